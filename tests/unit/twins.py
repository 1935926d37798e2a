"""Tests that hold both twins of a port to the same promises."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.testing import simulate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DEADLINE_S = 60.0


def on_twins(*twins: str) -> Callable[[Callable[..., Awaitable[None]]], Callable[[str], None]]:
    """Run an async test with each twin. Time is simulated for the one that is called "memory"."""

    def of(test: Callable[..., Awaitable[None]]) -> Callable[[str], None]:
        @pytest.mark.parametrize("twin", twins)
        @functools.wraps(test, assigned=["__name__", "__doc__", "__module__"], updated=[])
        def run(twin: str) -> None:
            async def main() -> None:
                with trio.fail_after(DEADLINE_S):
                    await test(twin)

            if twin == "memory":
                simulate(main)
            else:
                trio.run(main)

        del run.__wrapped__  # or pytest would read the arguments of the async test
        marked: Callable[[str], None] = run
        return marked

    return of
