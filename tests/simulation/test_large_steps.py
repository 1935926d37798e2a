"""A server does the long work on large steps and passes beside its event loop, and that of decodes at once."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from llmnode.core.ids import Step
from llmnode.core.model import FP32_BYTES
from llmnode.node.serve import long_work, session
from llmnode.session.passes import SwarmPasses
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Replay, pack
from llmnode.wire.payload import Codec
from simulation.passes import drawn, expected_output
from simulation.pushes import answers, open_frame
from simulation.world import ALL_BLOCKS, MODEL, ROW, SPANS, Dialogue, pairs_of_servers, simulated
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LARGE = 8
"""This number of positions is large in these tests."""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is done beside the event loop. A simulated clock does not wait for threads."""
    names: list[str] = []

    async def noted(work: Callable[[], T]) -> T:
        made: Any = work  # Any: a `partial`
        names.append(made.func.__name__)
        return work()

    for module in (session, long_work):
        monkeypatch.setattr(module, "in_thread", noted)
        monkeypatch.setattr(module, "IN_THREAD_BYTES", LARGE * FP32_BYTES * MODEL.hidden_size)
    return names


@simulated
async def test_what_takes_long_in_a_large_step_is_done_beside_the_event_loop(beside: list[str]) -> None:
    async with pairs_of_servers() as swarm, swarm.session(max_length=120) as (opened, _):
        dialogue = Dialogue(opened, random.Random(1))
        await dialogue.step(LARGE)
        expected = ["check_values", "decode", "_encoded", "receipt"]
        assert sorted(beside) == sorted(len(SPANS) * expected)
        beside.clear()
        for positions in (1, LARGE - 1):
            await dialogue.step(positions)
        assert not beside


@simulated
async def test_a_large_part_of_a_log_is_read_beside_the_event_loop(beside: list[str]) -> None:
    async with pairs_of_servers() as swarm:
        link = await swarm.internet.network("client", "9.9.9.9").dial(swarm.nodes["0a"].network.addresses[0])
        opening = open_frame(session.SessionId(b"s" * 16), 0)
        await link.send(opening)
        await link.send(Frame(FrameType.STEP, opening.session, length=LARGE, payload=bytes(LARGE * ROW)))
        await answers(link, 2)
        beside.clear()
        replay = Frame(FrameType.REPLAY, opening.session, step=Step(7), length=LARGE, meta=pack(Replay(push=False)))
        await link.send(replay)
        (answer,) = await answers(link, 1)
        assert answer.type is FrameType.REPLAYED
        assert beside == ["read", "blake3_digest"]


@simulated
async def test_what_takes_long_in_a_large_pass_is_done_beside_the_event_loop(beside: list[str]) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        passes = SwarmPasses(router.finder, Codec.RAW)
        hidden = drawn(1, LARGE)
        output, _ = await passes.outputs(ALL_BLOCKS, [LARGE], hidden)
        assert output == expected_output(hidden, [LARGE])
        assert sorted(beside) == sorted(len(SPANS) * ["_decoded", "encode", "is_sound"])


@in_trio
async def test_large_work_is_done_in_another_thread() -> None:
    here = threading.get_ident()
    assert await long_work.run(threading.get_ident, long_work.IN_THREAD_BYTES) != here
    assert await long_work.run(threading.get_ident, long_work.IN_THREAD_BYTES - 1) == here
