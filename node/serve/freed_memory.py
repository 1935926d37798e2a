"""How tasks wait for memory of the budget: they try again when some was given back, and not by a timer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from llmnode.core.budget import Scope

LEAST_S = 0.05
"""Memory is given back many times a second, and to try again may cost a look at all connections."""


async def freed(scope: Scope) -> None:
    """Return when something of the process that `scope` belongs to has been given back, after `LEAST_S` at least."""
    began_s, released = trio.current_time(), trio.Event()
    scope.watch(released.set)
    try:
        await released.wait()
    finally:
        scope.unwatch(released.set)
    await trio.sleep_until(began_s + LEAST_S)
