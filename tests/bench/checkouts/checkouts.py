"""`tests/bench/run checkouts OTHER`: decodes of this checkout against those of another one, such as an older commit.

Each checkout has servers and clients of its own, in processes of its own, all at the same time. They decode in turn, in
bursts of a second or less. In each round all of them are started anew: see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.kit.child import as_program
from bench.kit.options import add_repeats, add_thin, add_threads, add_tokens
from bench.kit.report import Report, Series, at_most, quartiles, ratios
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Row

ROOT = Path(__file__).resolve().parents[3]
SWARMS = ((1, 1), (3, 1), (1, 8))
"""Servers and clients."""
BURSTS = 8
"""The bursts of each checkout in a round. One more warms it up."""
WALL = "time"
QUANTITIES = WALL, "CPU of nodes", "CPU of workers", "CPU of clients"
MOST = 1.03
"""A larger ratio to the other checkout's time is no noise."""


def add(parser: argparse.ArgumentParser) -> None:
    what = (
        "another checkout of llmnode that is set up, for example a `git worktree` with `node/llmnode setup` run in it"
    )
    parser.add_argument("checkout", type=_checkout, metavar="OTHER", help=what)
    add_repeats(parser, 8)
    add_tokens(parser, 40, "tokens of each burst")
    add_thin(parser)
    add_threads(parser)
    parser.add_argument(
        "--servers",
        type=int,
        choices=sorted({servers for servers, _ in SWARMS}),
        help="only swarms with this number of servers (default: all)",
    )


def _checkout(text: str) -> Path:
    folder = Path(text).resolve()
    if not (folder / "python" / "llmnode").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of llmnode: it has no python/llmnode")
    if not list((folder / "python" / "llmnode").glob("_native*.so")):
        raise argparse.ArgumentTypeError(f"{text} is not set up: run {folder}/node/llmnode setup")
    return folder


def run(options: Options) -> Report:
    swarms = [each for each in SWARMS if options.servers in (None, each[0])][: 1 if options.thin else None]
    rows, aims = [], []
    for servers, clients in swarms:
        name = f"{_some(servers, 'server')}, {_some(clients, 'client')}"
        print(name, file=sys.stderr)
        ours, others, ratio = _measure(options, servers, clients)
        row: Row = {"swarm": name, "ours, ms/token": quartiles(ours[WALL]), "other's": quartiles(others[WALL])}
        row |= {f"{each}, ratio": quartiles(ratio[each]) for each in QUANTITIES}
        row["time, without order"] = without_order = _without_order(ratio[WALL])
        rows.append(row)
        aims.append(at_most(f"{name}: time a token, of the other checkout's", without_order, MOST))
    conditions = {"other": str(options.checkout), "tokens": options.tokens, "rounds": options.repeats}
    return Report(rows, aims, conditions)


def _without_order(values: Sequence[float]) -> float:
    """The geometric mean of two medians: of the rounds in which ours was started first, and of the others."""
    return statistics.geometric_mean([statistics.median(each) for each in (values[::2], values[1::2]) if each])


def _some(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _measure(options: Options, servers: int, clients: int) -> tuple[Series, Series, Series]:
    """Our values of each round, the other checkout's, and the ratios. Ours is started last in every second round."""
    ours, others, ratio = Series(), Series(), Series()
    for number in range(options.repeats):
        print(f"round {number + 1} of {options.repeats}", file=sys.stderr)
        one, other = Series(), Series()
        _decode_in_turn(options, servers, clients, [(ROOT, one), (options.checkout, other)][:: -1 if number % 2 else 1])
        for each in QUANTITIES:
            ours.note({each: statistics.median(one[each])})
            others.note({each: statistics.median(other[each])})
            ratio.note({each: statistics.median(ratios(one[each], other[each]))})
    return ours, others, ratio


def _decode_in_turn(options: Options, servers: int, clients: int, order: Sequence[tuple[Path, Series]]) -> None:
    """Start the checkouts in this order, and note the values of each burst."""
    arguments = servers, clients, max(2, options.tokens // clients), options.threads
    with ExitStack() as stack:
        decoders = [(stack.enter_context(_decoder(root, arguments)), series) for root, series in order]
        for number in range(-1, 1 if options.thin else BURSTS):
            for process, series in reversed(decoders) if number % 2 else decoders:
                values = json.loads(_answer(process, "go\n"))
                if number >= 0:
                    series.note(dict(zip(QUANTITIES, values, strict=True)))


@contextmanager
def _decoder(root: Path, arguments: Sequence[int]) -> Iterator[subprocess.Popen[str]]:
    """`decoder.py` with the package of a checkout, and with its Python if it has one of its own."""
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    environment = {**os.environ, "PYTHONPATH": str(root / "python"), "OMP_NUM_THREADS": str(arguments[-1])}
    command = [python, "-P", *as_program("bench.checkouts.decoder"), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            _answer(process, "")
            yield process
        finally:
            process.kill()  # its servers end with it; older commits take a minute to close their clients


def _answer(process: subprocess.Popen[str], line: str) -> str:
    """The process answers with a line. Raises ConfigError if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    if not (answer := process.stdout.readline()):
        raise ConfigError("a decoder has ended: see its error above")
    return answer
