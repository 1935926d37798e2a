"""The swarm that most simulations start with: two servers for each of three spans, some milliseconds apart."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.core.span import Span
from llmnode.testing import (
    EXACT_MODEL,
    Conditions,
    Dialogue,
    World,
    check_coverage,
    check_kv_is_free,
    open_world,
    simulated,
)
from llmnode.testing.world import FORWARD_S, KV_TOKENS

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

__all__ = [
    "ALL_BLOCKS",
    "DELAY_S",
    "FORWARD_S",
    "KV_TOKENS",
    "MODEL",
    "ROW",
    "SPANS",
    "Dialogue",
    "World",
    "kv_is_free",
    "pairs_of_servers",
    "simulated",
    "wander",
    "world",
]

MODEL = EXACT_MODEL
ALL_BLOCKS = Span(0, MODEL.blocks)
ROW = MODEL.row_bytes
SPANS = [Span(0, 2), Span(2, 4), Span(4, 6)]
DELAY_S = 0.02

kv_is_free = check_kv_is_free


@asynccontextmanager
async def world(seed: int = 0, conditions: Conditions | None = None) -> AsyncIterator[World]:
    async with open_world(seed, conditions=conditions or Conditions(delay_s=DELAY_S)) as world:
        yield world


@asynccontextmanager
async def pairs_of_servers(seed: int = 0, conditions: Conditions | None = None) -> AsyncIterator[World]:
    async with world(seed, conditions) as swarm:
        for index, span in enumerate(SPANS):
            for twin in "ab":
                await swarm.start(f"{index}{twin}", span)
        await check_coverage(swarm)
        yield swarm


async def wander(dialogue: Dialogue, rng: random.Random, steps: int, max_length: int) -> None:
    """Decodes and short prefills with pauses between them, and now and then a rollback; never beyond `max_length`."""
    for _ in range(steps):
        await dialogue.step(rng.choice([1, 1, 1, 5]))
        position = dialogue.session.position
        if position > max_length - 6 or rng.random() < 0.1:
            await dialogue.go_back(rng.randint(6, position) if position > 6 else 1)
        await trio.sleep(rng.choice([0, 0, 0.5]))
