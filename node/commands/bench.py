"""`llmnode bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        "  llmnode bench swarm\n  llmnode bench swarm --repeats 9 --json",
    )
    parser.add_argument(
        "name",
        choices=["codec", "swarm"],
        help="codec: 8-bit activations against bitsandbytes and others, on one core;"
        " swarm: 1, 2 and 3 servers against transformers in one process",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="rounds of all variants in turn (default 5)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="new tokens in a round (default 64)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of each process (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout's last line")


def run(arguments: argparse.Namespace) -> int:
    repeats = at_least_one(arguments.repeats, "--repeats")
    if arguments.name == "codec":
        from llmnode.node.bench.codec import CodecBench, bench_codec

        bench_codec(CodecBench(repeats, arguments.json))
        return 0

    import trio

    from llmnode.node.bench.swarm import SwarmBench, bench_swarm

    config = SwarmBench(
        repeats=repeats,
        tokens=max(2, arguments.tokens),
        threads=at_least_one(arguments.threads, "--threads"),
        json=arguments.json,
    )
    trio.run(bench_swarm, config)
    return 0
