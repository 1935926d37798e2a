"""`llmnode bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.node.commands.options import add_command, at_least_one

if TYPE_CHECKING:
    import argparse

    from llmnode.node.commands.options import Commands


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "measure this machine's swarm against what runs beside it",
        "  llmnode bench swarm\n  llmnode bench swarm --repeats 9 --json\n  llmnode bench quality",
    )
    parser.add_argument(
        "name",
        choices=["codec", "failures", "forwarding", "quality", "soak", "swarm", "table1"],
        help="codec: 8-bit activations against bitsandbytes and others, on one core;"
        " failures: a session while its servers are killed, frozen and stopped, in every way and at every moment;"
        " forwarding: hidden states from server to server against by way of the client, over links of 0 to 100 ms;"
        " quality: tokens and likelihood under lossy codecs and dtypes, against transformers in one process;"
        " soak: what servers have open after many sessions over links that break, and whether anything grows;"
        " swarm: the speed of 1, 2 and 3 servers against transformers in one process;"
        " table1: the Petals paper's table of speeds when stages fail, beside restarts and no cache",
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
        help="new tokens in a round, or a prompt (default 64; quality: 32, forwarding: 24)",
    )
    parser.add_argument(
        "--chunks", type=int, default=32, metavar="N", help="quality: pieces of text, of 128 tokens (default 32)"
    )
    parser.add_argument("--thin", action="store_true", help="failures, forwarding, soak, table1: a part, sooner")
    parser.add_argument("--only", default="", metavar="CELLS", help="failures: those whose names begin so, as kill")
    parser.add_argument("--minutes", type=float, metavar="M", help="soak: for so long (default 30; --thin: 0.25)")
    parser.add_argument("--saturate", action="store_true", help="soak: keep every core busy meanwhile")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of each process (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout's last line")


def run(arguments: argparse.Namespace) -> int:
    repeats = at_least_one(5 if arguments.repeats is None else arguments.repeats, "--repeats")
    if arguments.name == "codec":
        from llmnode.node.bench.codec import CodecBench, bench_codec

        bench_codec(CodecBench(repeats, arguments.json))
        return 0
    if arguments.name == "quality":
        from llmnode.node.bench.quality import QualityBench, bench_quality

        bench_quality(
            QualityBench(
                tokens=at_least_one(32 if arguments.tokens is None else arguments.tokens, "--tokens"),
                chunks=at_least_one(arguments.chunks, "--chunks"),
                threads=at_least_one(arguments.threads, "--threads"),
                json=arguments.json,
            )
        )
        return 0

    import trio

    if arguments.name == "failures":
        from llmnode.node.bench.cells import choose

        cells, threads = choose(thin=arguments.thin, only=arguments.only), at_least_one(arguments.threads, "--threads")
        from llmnode.node.bench.failures import FailuresBench, bench_failures

        trio.run(bench_failures, FailuresBench(cells, threads, arguments.json))
        return 0

    if arguments.name == "table1":
        from llmnode.node.bench.table1 import Table1Bench, bench_table1

        rounds = (1 if arguments.thin else 3) if arguments.repeats is None else repeats
        threads = at_least_one(arguments.threads, "--threads")
        trio.run(bench_table1, Table1Bench(rounds, arguments.thin, threads, arguments.json))
        return 0

    if arguments.name == "forwarding":
        from llmnode.node.bench.forwarding import ForwardingBench, bench_forwarding

        tokens = 24 if arguments.tokens is None else max(2, arguments.tokens)
        threads = at_least_one(arguments.threads, "--threads")
        trio.run(bench_forwarding, ForwardingBench(repeats, tokens, arguments.thin, threads, arguments.json))
        return 0

    if arguments.name == "soak":
        from llmnode.node.bench.soak import SoakBench, bench_soak

        minutes = arguments.minutes or (0.25 if arguments.thin else 30.0)
        if minutes < 0:
            raise ConfigError(f"--minutes {minutes:g}: give more than 0")
        threads = at_least_one(arguments.threads, "--threads")
        trio.run(bench_soak, SoakBench(minutes, arguments.saturate, arguments.thin, threads, arguments.json))
        return 0

    from llmnode.node.bench.swarm import SwarmBench, bench_swarm

    config = SwarmBench(
        repeats=repeats,
        tokens=64 if arguments.tokens is None else max(2, arguments.tokens),
        threads=at_least_one(arguments.threads, "--threads"),
        json=arguments.json,
    )
    trio.run(bench_swarm, config)
    return 0
