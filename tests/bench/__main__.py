"""The command line of the benchmarks: `tests/bench/run NAME`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from bench.kit.options import Options
from bench.registry import BENCHES
from llmnode.node.cli import run, settle_libraries, status_of
from llmnode.node.commands.options import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "tests/bench/run"


def main(argv: Sequence[str]) -> int:
    settle_libraries()
    width = max(map(len, BENCHES))
    parser = _parser(
        PROGRAM,
        "Measure llmnode against what runs beside it.",
        "benchmarks:\n" + "\n".join(f"  {name:{width}}  {bench.about}" for name, bench in BENCHES.items()),
        [f"{PROGRAM} codec", f"{PROGRAM} swarm --help", f"{PROGRAM} swarm --repeats 9 --json"],
    )
    parser.add_argument("name", choices=BENCHES, metavar="NAME", help="one of those below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="OPTION", help="see NAME --help")
    given = parser.parse_args(argv)
    return _run(given.name, given.rest)


def _run(name: str, argv: Sequence[str]) -> int:
    import torch

    from bench.kit.report import print_report

    bench, program = BENCHES[name], f"{PROGRAM} {name}"
    usual = " ".join([program, *bench.needs])
    parser = _parser(program, f"Measures {bench.about}.", "", [usual, f"{usual} --json"])
    bench.declare(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout's last line")
    options = parser.parse_args(argv, Options())
    torch.set_num_threads(options.threads)
    report = bench.run(options)
    if isinstance(report, int):
        return report
    print_report(name, options.threads, report, as_json=options.json)
    sys.stdout.flush()
    return 0


def _parser(program: str, description: str, more: str, examples: Sequence[str]) -> Parser:
    return Parser(
        prog=program,
        description=description,
        epilog="\n".join([*([more, ""] if more else []), "examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


if __name__ == "__main__":
    run(lambda: status_of(lambda: main(sys.argv[1:])))
