"""Decodes and sessions cost a client and its servers a number of Python calls and no more, whatever the machine."""

from __future__ import annotations

import random
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import llmnode
from llmnode.core.policy import ClientPolicy
from llmnode.testing import check_coverage
from llmnode.wire.payload import Codec
from simulation.world import SPANS, Dialogue, simulated, world

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

PLACE = Path(llmnode.__file__).parent
STEPS = 20
MOST_CALLS = 1190
"""Our functions are called 1,189 times for a decode through three servers, and shortcuts save 30 calls or more each.
Lower it when you have saved some. If something new needs more, measure what it costs: `tests/bench/run checkouts`."""

SESSIONS = 10
MOST_CALLS_OF_A_SESSION = 4360
"""Our functions are called 4,354 times to open a session over three servers, give it four positions, and close it. That
is a good part of the time of a short answer."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of Python functions, by their file and qualified name, until the context ends."""
    counts = Counter[str]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            counts[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def ours(counts: Counter[str]) -> int:
    return sum(number for name, number in counts.items() if name.startswith(f"{PLACE}/") and "/testing/" not in name)


@simulated
async def test_a_decode_takes_its_shortcuts() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await swarm.start(str(index), span)
        await check_coverage(swarm)
        async with swarm.client(ClientPolicy()) as (router, _), router.open_session(200, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            for _ in range(STEPS // 2):
                await dialogue.step(1)
            with counted() as counts:
                for _ in range(STEPS):
                    await dialogue.step(1)

    def calls(*names: str) -> float:
        return sum(number for name, number in counts.items() if name.endswith(names)) / STEPS

    assert ours(counts) / STEPS <= MOST_CALLS
    assert calls(":NurseryManager.__aenter__", ":Runner.spawn_impl") < len(SPANS), "no hop needs a nursery or a task"
    assert calls(":CancelScope.__enter__") < 12, "three a hop"
    assert calls(":current_effective_deadline") < 1, "a server with nothing else to do asks for none"


@simulated
async def test_a_session_is_opened_and_closed_in_few_calls() -> None:
    async def answer_shortly() -> None:
        async with router.open_session(20, Codec.RAW) as session:
            await Dialogue(session, random.Random(1)).step(4)

    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await swarm.start(str(index), span)
        await check_coverage(swarm)
        async with swarm.client(ClientPolicy()) as (router, _):
            for _ in range(SESSIONS):
                await answer_shortly()
            with counted() as counts:
                for _ in range(SESSIONS):
                    await answer_shortly()
    assert ours(counts) / SESSIONS <= MOST_CALLS_OF_A_SESSION
