"""Async tests of real hosts and sockets, whose clock is the real one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DEADLINE_S = 120.0
"""For whatever a test waits for, on a busy machine."""


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, under one deadline."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:  # Any: whatever a test asks pytest for
        async def bounded() -> None:
            with trio.fail_after(DEADLINE_S):
                await test(**fixtures)

        trio.run(bounded)

    return run
