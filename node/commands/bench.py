"""`llmnode bench`: in a checkout it starts the benchmarks of `tests/bench`, which are not installed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from llmnode.errors import ConfigError
from llmnode.node.commands.options import add_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.node.commands.options import Commands

TESTS = Path(__file__).resolve().parents[2] / "tests"


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "run a benchmark of the repository (in a checkout only)",
        "  llmnode bench\n  llmnode bench swarm --repeats 9 --json\n  llmnode bench quality --help",
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="NAME ...",
        help="the benchmark and its options; without a name, a list of all benchmarks",
    )


def run(arguments: argparse.Namespace) -> int:
    if not (TESTS / "bench").is_dir():
        raise ConfigError(
            "the benchmarks are in the repository, in tests/bench, and not in an installed llmnode: "
            "clone it, and run tests/bench/run there"
        )
    start(arguments.words or ["--help"])


def start(argv: Sequence[str]) -> NoReturn:
    """This process becomes the benchmark."""
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "bench", *argv]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
