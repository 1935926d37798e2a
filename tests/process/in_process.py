"""Commands and examples that run in this process, which has loaded their libraries already.

Loading them takes a process several seconds. Tests of signals, of stdin, and of how a process ends start one.
"""

from __future__ import annotations

import io
import logging
import os
import runpy
import sys
import traceback
from contextlib import contextmanager
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, NoReturn
from unittest.mock import patch

import torch

from bench import __main__ as benchmarks
from llmnode.node import cli, commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


INTERRUPTED = 130
"""The exit status of a program that Ctrl-C has ended."""


def llmnode(*arguments: str) -> CompletedProcess[str]:
    """Runs the command line `llmnode ARGUMENTS`; a benchmark, too."""
    with patch.object(commands.bench, "start", _become_the_benchmark):
        return _completed(["llmnode", *arguments], lambda: cli.main(arguments))


def program(file: Path, *arguments: str, typed: str | None = None) -> CompletedProcess[str]:
    """Runs `python FILE ARGUMENTS`. A user has `typed` lines."""

    def run() -> int:
        runpy.run_path(str(file), run_name="__main__")
        return 0

    return _completed([str(file), *arguments], run, typed)


def _become_the_benchmark(argv: Sequence[str]) -> NoReturn:
    """Stands for `commands.bench.start`, which replaces its process."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(commands.bench.TESTS), os.environ.get("PYTHONPATH")]))
    raise SystemExit(benchmarks.main(argv))


def _completed(command: list[str], run: Callable[[], int], typed: str | None = None) -> CompletedProcess[str]:
    out, err = io.BytesIO(), io.BytesIO()
    with (
        _settings_kept(),
        patch.object(sys, "argv", command),
        patch.object(sys, "stdin", None if typed is None else io.StringIO(typed)),
        patch.object(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True)),
        patch.object(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8", write_through=True)),
    ):
        try:
            status = run()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:  # noqa: BLE001 - so does Python with an error that nobody catches
            traceback.print_exc()
            status = 1
        if status == INTERRUPTED:
            raise KeyboardInterrupt("it was meant for all tests")
        return CompletedProcess(command, status, out.getvalue().decode(), err.getvalue().decode())


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Puts the environment, the logs and torch's threads back: a program settles them for its whole process."""
    root, ours, threads = logging.getLogger(), logging.getLogger("llmnode"), torch.get_num_threads()
    levels, handlers = (root.level, ours.level), (root.handlers[:], ours.handlers[:])
    with patch.dict(os.environ):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for logger, level, before in zip((root, ours), levels, handlers, strict=True):
                logger.setLevel(level)
                logger.handlers[:] = before
