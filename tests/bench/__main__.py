"""The command line of the benchmarks: `tests/bench/run NAME`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bench import ladder
from llmnode.node.cli import settle_libraries, status_of
from llmnode.node.commands.options import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    settle_libraries()
    parser = Parser(prog="tests/bench/run")
    ladder.add(parser)
    return ladder.run(parser.parse_args(argv))


if __name__ == "__main__":
    try:
        status = status_of(lambda: main(sys.argv[1:]))
    except SystemExit as ended:  # by --help
        status = ended.code if isinstance(ended.code, int) else 0
    os._exit(status)
