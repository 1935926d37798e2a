"""Adapters and prompts that have diverged end training and sessions soon, and no honest server pays for it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio

from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.core.policy import ClientPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError, NumericOverflow
from llmnode.session.passes import SwarmPasses
from llmnode.testing import Conditions, exact_output, open_world
from llmnode.testing import worker as exact_worker
from llmnode.testing.exact_blocks import exact_input
from llmnode.testing.hostile import check_no_wrong_ban
from llmnode.wire.adapter import make_adapter
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.adapters import drawn_adapter, there_and_back
from simulation.world import ALL_BLOCKS, DELAY_S, MODEL, ROW, SPANS, Dialogue, World, pairs_of_servers, simulated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.session.router import Router
    from llmnode.testing.world import ServingNode
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.frame import Frame

HUGE, ABSURD = 1e30, 1e12
SOON_S = 2.0
PATIENCE_S = ClientPolicy().recovery.overflow_patience_s
HIDDEN = exact_input(random.Random(1), 3)


def diverged(block: int, largest: float = HUGE) -> Adapter:
    """An adapter with absurd numbers in one block. Its maker has seen some of this size at most."""
    parts = {each: (np.full(2, HUGE if each == block else 1.0, "<f4").tobytes(), 2) for each in range(MODEL.blocks)}
    return make_adapter(MODEL.digest, parts, largest)


def is_absurd(numbers: bytes) -> bool:
    """Other adapters of these tests are random bytes."""
    return bool(np.isin(np.frombuffer(numbers, "<f4"), np.array([HUGE, ABSURD], "<f4")).any())


@pytest.fixture(autouse=True)
def overflowing_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks put out no numbers if their part of an adapter, or their prompts, have absurd ones, or for no numbers."""

    def output(
        hidden: bytes, span: Span, adapter: Mapping[int, bytes] | None = None, prompts: Sequence[bytes] = ()
    ) -> bytes:
        parts = [part for block, part in (adapter or {}).items() if span.start <= block < span.end]
        if hidden == b"\xff" * len(hidden) or any(map(is_absurd, [*parts, *prompts])):
            return b"\xff" * len(hidden)
        return exact_output(hidden, span, adapter, prompts)

    monkeypatch.setattr(exact_worker, "exact_output", output)


async def run_into_overflow(
    kind: str, router: Router, adapter: Adapter | None, prompts: DeepPrompts = NO_PROMPTS
) -> float:
    """The time until a forward, or a step of a session, says that its numbers overflow."""
    began_s = trio.current_time()
    with pytest.raises(NumericOverflow, match="smaller learning rate"):
        await compute(kind, router, adapter, prompts)
    return trio.current_time() - began_s


async def compute(kind: str, router: Router, adapter: Adapter | None, prompts: DeepPrompts) -> bytes:
    """The output of a forward, or of a step of a session."""
    if kind == "training":
        output, _ = await SwarmPasses(router.finder, Codec.RAW).outputs(ALL_BLOCKS, [3], HIDDEN, adapter, prompts)
        return bytes(output)
    async with router.open_session(64, Codec.RAW, adapter=adapter, prompts=prompts) as session:
        return bytes(await session.step(HIDDEN))


def banned(router: Router) -> set[PeerId | None]:
    return {error.peer for _, error in router.finder.banned}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["training", "session"])
@pytest.mark.parametrize("block", [0, 3])
@simulated
async def test_an_adapter_with_absurd_numbers_ends_at_once(kind: str, block: int) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        assert await run_into_overflow(kind, router, diverged(block)) < SOON_S
        assert not banned(router)
        await sound_work(router)


@pytest.mark.parametrize("kind", ["training", "session"])
@simulated
async def test_prompts_with_absurd_numbers_end_at_once(kind: str) -> None:
    values = np.ones((MODEL.blocks, MODEL.hidden_size), "<f4")
    values[4] = ABSURD
    prompts = DeepPrompts(MODEL.blocks, 1, 1, values.tobytes())
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        assert await run_into_overflow(kind, router, None, prompts) < SOON_S
        assert not banned(router)


@pytest.mark.parametrize("kind", ["training", "session"])
@simulated
async def test_independent_servers_that_agree_end_it_at_once(kind: str) -> None:
    """The numbers of the adapter look usual: only blocks show that they are not."""
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        assert await run_into_overflow(kind, router, diverged(2, largest=20.0)) < SOON_S
        assert not banned(router)


@pytest.mark.parametrize("kind", ["training", "session"])
@simulated
async def test_the_only_server_is_believed_after_some_seconds(kind: str) -> None:
    async with open_world(conditions=Conditions(delay_s=DELAY_S)) as swarm:
        await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            took_s = await run_into_overflow(kind, router, diverged(2, largest=20.0))
            assert PATIENCE_S <= took_s < PATIENCE_S + 3
            assert not banned(router)
            await sound_work(router)


@pytest.mark.parametrize("kind", ["training", "session"])
@simulated
async def test_servers_of_before_that_name_no_overflow_are_believed_if_the_adapter_is_absurd(kind: str) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        for node in swarm.nodes.values():
            node.network.tamper = as_before
        assert await run_into_overflow(kind, router, diverged(3)) < SOON_S
        assert not banned(router)


def as_before(_peer: PeerId, frame: Frame) -> list[Frame]:
    if frame.type is FrameType.REFUSAL and b"overflow" in bytes(frame.meta):
        return [refusal_of(frame, RefusalCode.COMPUTE_FAILED, "numbers that are not finite")]
    return [frame]


async def sound_work(router: Router) -> None:
    """A pass and a session with an adapter are right to the bit."""
    adapter = drawn_adapter(random.Random(3))
    await there_and_back(SwarmPasses(router.finder, Codec.RAW), 1, [3, 1], adapter)
    async with router.open_session(64, Codec.RAW, adapter=adapter) as session:
        assert bytes(await session.step(HIDDEN)) == exact_output(HIDDEN, ALL_BLOCKS, adapter.parts)


def claims_overflow(_peer: PeerId, frame: Frame) -> list[Frame]:
    """A liar: it says so of each step and pass."""
    if frame.type in (FrameType.EVALUATED, FrameType.GRADIENT, FrameType.RESULT):
        return [refusal_of(frame, RefusalCode.OVERFLOW, "numbers that are not finite")]
    return [frame]


async def with_a_liar(swarm: World, span: Span) -> ServingNode:
    """Honest pairs, and one that says that it is the fastest."""
    for index, each in enumerate(SPANS):
        for twin in "ab":
            await swarm.start(f"{index}{twin}", each)
    liar = await swarm.start("liar", span, said_us=1)
    liar.network.tamper = claims_overflow
    return liar


@pytest.mark.parametrize("span", [ALL_BLOCKS, Span(2, 6), Span(2, 4)], ids=str)
@simulated
async def test_one_liar_ends_no_training(span: Span) -> None:
    """Nor does it make gradients NaNs."""
    async with open_world(conditions=Conditions(delay_s=DELAY_S)) as swarm:
        liar = await with_a_liar(swarm, span)
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            for seed in range(6):
                began_s = trio.current_time()
                await there_and_back(client, seed, [5, 1, 3], drawn_adapter(random.Random(seed)))
                assert trio.current_time() - began_s < SOON_S
            assert liar.worker.executor.forwards, "it was asked"
            assert not banned(router)


@pytest.mark.parametrize("span", [ALL_BLOCKS, Span(2, 6), Span(2, 4)], ids=str)
@simulated
async def test_one_liar_ends_no_session_and_is_banned_for_it(span: Span) -> None:
    async with open_world(conditions=Conditions(delay_s=DELAY_S)) as swarm:
        liar = await with_a_liar(swarm, span)
        async with swarm.client() as (router, _):
            began_s = trio.current_time()
            async with router.open_session(64, Codec.RAW) as session:
                dialogue = Dialogue(session, random.Random(1))
                for positions in (9, 1, 1):
                    await dialogue.step(positions)
            assert trio.current_time() - began_s < 2 * SOON_S
            assert banned(router) == {liar.peer}


@pytest.mark.parametrize("kind", ["training", "session"])
@simulated
async def test_a_liar_ends_nothing_while_its_honest_twin_has_no_memory(kind: str) -> None:
    outage_s = 2 * PATIENCE_S
    async with open_world(conditions=Conditions(delay_s=DELAY_S)) as swarm:
        liar = await swarm.start("liar", ALL_BLOCKS, said_us=1)
        honest = await swarm.start("honest", ALL_BLOCKS)
        liar.network.tamper = claims_overflow
        honest.worker.executor.fails = 10_000

        async def recover() -> None:
            await trio.sleep(outage_s)
            honest.worker.executor.fails = 0

        async with swarm.client() as (router, _), trio.open_nursery() as nursery:
            nursery.start_soon(recover)
            began_s = trio.current_time()
            assert await compute(kind, router, None, NO_PROMPTS) == exact_output(HIDDEN, ALL_BLOCKS)
            assert trio.current_time() - began_s >= outage_s


@pytest.mark.parametrize("chunk_tokens", [512, 2], ids=["at once", "in its second chunk"])
@pytest.mark.parametrize("span", SPANS, ids=str)
@simulated
async def test_a_session_stands_where_it_stood_after_a_step_that_overflowed(
    span: Span, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pairs_of_servers() as swarm, swarm.client(ClientPolicy(chunk_tokens=chunk_tokens)) as (router, _):
        async with router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(5)
            with monkeypatch.context() as patched:

                def output(hidden: bytes, blocks: Span, *more: Any) -> bytes:  # Any: what `exact_output` takes
                    is_next = blocks == span and len(hidden) == 5 * ROW + len(HIDDEN)
                    return b"\xff" * len(hidden) if is_next else exact_output(hidden, blocks, *more)

                patched.setattr(exact_worker, "exact_output", output)
                with pytest.raises(NumericOverflow):
                    await session.step(HIDDEN)
            assert session.position == 5
            await dialogue.step(3)
            await dialogue.step(1)
        check_no_wrong_ban(router.finder, [node.peer for node in swarm.nodes.values()])  # type: ignore[arg-type]


@simulated
async def test_hidden_states_that_no_block_can_compute_with_are_not_sent() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        async with router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(2)
            for numbers in (b"\xff" * ROW, np.full(2 * MODEL.hidden_size, HUGE, "<f4").tobytes()):
                with pytest.raises(ConfigError, match=r"hidden states.*not sent"):
                    await session.step(numbers)
            await dialogue.step(2)
            assert not session.recoveries
        assert not banned(router)


@simulated
async def test_gradients_that_overflow_at_the_only_server_are_waited_for_by_nobody() -> None:
    async with open_world(conditions=Conditions(delay_s=DELAY_S)) as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            _, crossed = await client.outputs(ALL_BLOCKS, [3], HIDDEN)
            node.network.tamper = claims_overflow
            began_s = trio.current_time()
            assert np.isnan(np.frombuffer(await client.gradients(crossed, HIDDEN), "<f4")).all()
            assert trio.current_time() - began_s < 1
