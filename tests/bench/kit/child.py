"""Runs modules of the benchmarks as programs: a child process does not have this folder on its path."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


def as_program(module: str, **variables: str) -> tuple[str, ...]:
    """The arguments of `python -P` that run a module of the package `bench`, as `-m` would.

    It has these `variables` in its environment: those of settings are taken out of a server's own.
    """
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    setting = f"os.environ.update({variables!r})"
    return "-c", f"import os, runpy, sys; {setting}; sys.path.insert(0, {str(TESTS)!r}); {run}"
