"""Several dialogues at once, each through its own session."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.wire.payload import Codec
from simulation.world import (
    Dialogue,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.session.router import Router


@asynccontextmanager
async def opened(
    router: Router, beams: int, *, beside: bool = False, max_length: int = 64
) -> AsyncIterator[list[Dialogue]]:
    """A dialogue through each of several sessions, `beside` each other or wherever the router chooses."""
    async with AsyncExitStack() as stack:
        dialogues: list[Dialogue] = []
        for index in range(beams):
            first = dialogues[0].session if beside and dialogues else None
            session = await stack.enter_async_context(router.open_session(max_length, Codec.RAW, first))
            dialogues.append(Dialogue(session, random.Random(index)))
        yield dialogues


async def step_all(dialogues: list[Dialogue], positions: int = 1) -> None:
    async with trio.open_nursery() as nursery:
        for dialogue in dialogues:
            nursery.start_soon(dialogue.step, positions)
