"""Runs modules of the benchmarks as programs: a child process does not have this folder on its path."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


def as_program(module: str) -> tuple[str, ...]:
    """The arguments of `python -P` that run a module of the package `bench`, as `-m` would."""
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return "-c", f"import runpy, sys; sys.path.insert(0, {str(TESTS)!r}); {run}"
