"""Tests that play with peers of other implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.errors import single_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PATIENCE_S = 100.0
"""The time for 100 MB both ways on a busy machine."""


def played(test: Callable[[], Awaitable[None]]) -> None:
    """Run an async test, under one deadline."""

    async def bounded() -> None:
        with single_error(), trio.fail_after(PATIENCE_S):
            await test()

    trio.run(bounded)
