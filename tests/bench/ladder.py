"""The benchmarks and their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node.commands.options import MOST_THREADS, at_least_one
from llmnode.node.values import model, path

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        choices=[
            "clients",
            "codec",
            "failures",
            "forward",
            "forwarding",
            "memory",
            "pipeline",
            "quality",
            "soak",
            "swarm",
            "table1",
            "transport",
            "workers",
        ],
        help="clients: 1 to 16 clients of one server against one alone, and who decodes beside a long prompt;"
        " codec: 8-bit activations against bitsandbytes and others, on one core, and packing without loss;"
        " failures: a session while its servers are killed, frozen and stopped, in every way and at every moment;"
        " forward: batches of 1, 16 and 64 rows through two servers against one process;"
        " forwarding: hidden states from server to server against by way of the client, over links of 0 to 100 ms;"
        " memory: what a server takes, against itself, its tensors and its KV, and while it loads;"
        " pipeline: several texts at once through 1, 2 and more servers, against one after another;"
        " quality: tokens and likelihood under lossy codecs, dtypes and weights, against transformers in one process;"
        " soak: what servers have open after many sessions over links that break, and whether anything grows;"
        " swarm: the speed of 1, 2 and 3 servers against transformers in one process;"
        " table1: the Petals paper's table of speeds when stages fail, beside restarts and no cache;"
        " transport: our Noise and yamux against go-libp2p, py-libp2p's own and bare TCP: without delay, at 100 ms,"
        " and small beside bulk at 10 MB/s;"
        " workers: what a hop costs with the blocks in a thread of the node and in a process of their own, idle and"
        " under load",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="rounds of all variants in turn (default 5; table1: 3, thin 1; quality: one)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="new tokens in a round, or a prompt (default 64; quality: 32; forwarding and pipeline: 24; workers: 400)",
    )
    parser.add_argument(
        "--chunks", type=int, default=32, metavar="N", help="quality: pieces of text, of 128 tokens (default 32)"
    )
    parser.add_argument(
        "--thin",
        action="store_true",
        help="a part, sooner: clients, failures, forward, forwarding, memory, pipeline, quality, soak, table1,"
        " transport, workers",
    )
    parser.add_argument(
        "--plot",
        type=path,
        metavar="FILE",
        help="pipeline: draw tokens against time; clients: decodes beside a prefill against it (.svg, .png, .pdf)",
    )
    parser.add_argument(
        "--model",
        type=model,
        metavar="NAME",
        help="clients, swarm: as for serve, or llama-34m or llama-222m, of random weights (default: the embedded one)",
    )
    parser.add_argument("--only", default="", metavar="CELLS", help="failures: those whose names begin so, as kill")
    parser.add_argument("--minutes", type=float, metavar="M", help="soak: for so long (default 30; --thin: 0.25)")
    parser.add_argument("--saturate", action="store_true", help="soak: keep every core busy meanwhile")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of each process (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout's last line")


def _plot(file: Path | None) -> Path | None:
    """Raises ConfigError now rather than when all is measured."""
    if file is None:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'llmnode[plot]'") from error
    forms = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix[1:] not in forms:
        raise ConfigError(f"--plot {file}: end its name in one of {', '.join('.' + form for form in forms)}")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}")
    return file


def run(arguments: argparse.Namespace) -> int:
    repeats = at_least_one(5 if arguments.repeats is None else arguments.repeats, "--repeats")
    threads = at_least_one(arguments.threads, "--threads", MOST_THREADS)
    if arguments.name == "codec":
        from bench.codec.codec import CodecBench, bench_codec

        bench_codec(CodecBench(repeats, arguments.json))
        return 0
    if arguments.name == "quality":
        from bench.quality.quality import QualityBench, bench_quality

        bench_quality(
            QualityBench(
                tokens=at_least_one(32 if arguments.tokens is None else arguments.tokens, "--tokens"),
                chunks=at_least_one(arguments.chunks, "--chunks"),
                thin=arguments.thin,
                threads=threads,
                json=arguments.json,
            )
        )
        return 0

    import trio

    if arguments.name == "clients":
        return _clients(arguments, repeats, threads)

    if arguments.name == "failures":
        from bench.failures.cells import choose

        cells = choose(thin=arguments.thin, only=arguments.only)
        from bench.failures.failures import FailuresBench, bench_failures

        trio.run(bench_failures, FailuresBench(cells, threads, arguments.json))
        return 0

    if arguments.name == "table1":
        from bench.table1.table1 import Table1Bench, bench_table1

        rounds = (1 if arguments.thin else 3) if arguments.repeats is None else repeats
        trio.run(bench_table1, Table1Bench(rounds, arguments.thin, threads, arguments.json))
        return 0

    if arguments.name == "forward":
        from bench.forward import ForwardBench, bench_forward

        trio.run(bench_forward, ForwardBench(repeats, arguments.thin, threads, arguments.json))
        return 0

    if arguments.name == "forwarding":
        from bench.forwarding import ForwardingBench, bench_forwarding

        tokens = 24 if arguments.tokens is None else max(2, arguments.tokens)
        trio.run(bench_forwarding, ForwardingBench(repeats, tokens, arguments.thin, threads, arguments.json))
        return 0

    if arguments.name == "memory":
        from bench.memory import MemoryBench, bench_memory

        trio.run(bench_memory, MemoryBench(arguments.thin, threads, arguments.json))
        return 0

    if arguments.name == "pipeline":
        from bench.pipeline.pipeline import PipelineBench, bench_pipeline

        tokens = 24 if arguments.tokens is None else max(2, arguments.tokens)
        bench = PipelineBench(repeats, tokens, arguments.thin, threads, arguments.json, _plot(arguments.plot))
        trio.run(bench_pipeline, bench)
        return 0

    if arguments.name == "transport":
        from bench.transport.transport import TransportBench, bench_transport

        trio.run(bench_transport, TransportBench(repeats, arguments.thin, arguments.json))
        return 0

    if arguments.name == "workers":
        return _workers(arguments, repeats)

    if arguments.name == "soak":
        from bench.soak.soak import SoakBench, bench_soak

        minutes = arguments.minutes or (0.25 if arguments.thin else 30.0)
        if not 0 < minutes < float("inf"):
            raise ConfigError(f"--minutes {minutes:g}: give more than 0")
        trio.run(bench_soak, SoakBench(minutes, arguments.saturate, arguments.thin, threads, arguments.json))
        return 0

    from bench.swarm import SwarmBench, bench_swarm

    config = SwarmBench(
        model=arguments.model,
        repeats=repeats,
        tokens=64 if arguments.tokens is None else max(2, arguments.tokens),
        threads=threads,
        json=arguments.json,
    )
    trio.run(bench_swarm, config)
    return 0


def _clients(arguments: argparse.Namespace, repeats: int, threads: int) -> int:
    import trio

    from bench.clients.clients import ClientsBench, bench_clients

    tokens, drawn = 64 if arguments.tokens is None else max(2, arguments.tokens), _plot(arguments.plot)
    asked = (arguments.model, repeats, tokens, arguments.thin, threads, arguments.json, drawn)
    trio.run(bench_clients, ClientsBench(*asked))
    return 0


def _workers(arguments: argparse.Namespace, repeats: int) -> int:
    import trio

    from bench.workers.workers import WorkersBench, bench_workers

    steps = (40 if arguments.thin else 400) if arguments.tokens is None else max(2, arguments.tokens)
    threads = at_least_one(arguments.threads, "--threads", MOST_THREADS)
    trio.run(bench_workers, WorkersBench(repeats, steps, arguments.thin, threads, arguments.json))
    return 0
