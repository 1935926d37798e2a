"""A server that has served for long, and then never gives one kind of answer, is given up soon, whatever the answer."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, LinkPolicy, PushPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, Dialogue, open_world, seeds, simulated
from llmnode.wire.frame import FrameType
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.ids import PeerId
    from llmnode.testing import World
    from llmnode.wire.frame import Frame

SPANS = {"0a": Span(0, 3), "0b": Span(0, 3), "1a": Span(3, 6), "1b": Span(3, 6)}
WITHIN_S = 17.0
"""A step at a known hop may take 15 s more than 20 times what it took (`ClientPolicy.step_patience_s`)."""
PUSH_S = PushPolicy().patience_s
"""A step that a hop before has pushed is given again after this time."""


@pytest.mark.parametrize("withheld", ["RESULT", "TRUNCATED", "FORWARDED", "REPLAYED", "FORKED"])
@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_a_session_goes_on_soon_without_a_server_that_withholds(withheld: str, seed: int) -> None:
    async with pairs(seed) as world, AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client())
        session, copy = [await stack.enter_async_context(client.router.open_session(64, Codec.RAW)) for _ in "12"]
        dialogue = Dialogue(session, random.Random(seed))
        for positions in (9, *[1] * 20):
            await dialogue.step(positions)
        mute(world, session.route[0].peer, FrameType[withheld])
        began_s = trio.current_time()
        match withheld:
            case "FORKED":
                await session.fork([copy])
                assert copy.position == session.position
            case "REPLAYED":  # the hop before has what the next one needs
                world.kill(str(session.route[1].peer).removeprefix("peer-"))
            case "TRUNCATED":
                await dialogue.go_back(4)
            case "FORWARDED":
                session._hops.hops[0].pushing.is_trusted = False
                session._state.unsettle()
            case _:
                pass
        await dialogue.step(1)
        took_s = trio.current_time() - began_s
        assert took_s > 1, "it was withheld"
        assert took_s < WITHIN_S + (LinkPolicy().silence_s if withheld == "REPLAYED" else 0)
        assert session.recoveries or withheld == "FORKED"


@asynccontextmanager
async def pairs(seed: int) -> AsyncIterator[World]:
    async with open_world(seed, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        for name, span in SPANS.items():
            await world.start(name, span)
        await trio.sleep(5)
        yield world


async def step_s(dialogue: Dialogue) -> float:
    """The time that a decode takes."""
    began_s = trio.current_time()
    await dialogue.step(1)
    return trio.current_time() - began_s


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_a_server_that_hangs_after_the_first_step_costs_less_if_another_one_computes(seed: int, hop: int) -> None:
    took_s = {}
    for replaced_s in (ClientPolicy().replaced_patience_s, ClientPolicy().step_patience_s):  # the latter as before
        policy = ClientPolicy(replaced_patience_s=replaced_s)
        async with pairs(seed) as world, world.client(policy) as client, AsyncExitStack() as stack:
            session = await stack.enter_async_context(client.router.open_session(64, Codec.RAW))
            dialogue = Dialogue(session, random.Random(seed))
            await dialogue.step(9)
            mute(world, session.route[hop].peer, FrameType.RESULT)
            took_s[replaced_s] = await step_s(dialogue)
            assert len(session.recoveries) == 1
    early_s, late_s = took_s.values()
    assert late_s > 15
    assert early_s < 10.5 + PUSH_S * hop
    assert late_s - early_s > 6.5


@simulated
async def test_a_server_that_is_silent_for_a_while_is_kept_if_no_other_one_computes() -> None:
    async with pairs(0) as world, world.client() as client, client.router.open_session(64, Codec.RAW) as session:
        dialogue = Dialogue(session, random.Random(0))
        await dialogue.step(9)
        for node in world.nodes.values():
            node.worker.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialogue.step, 1)
            await trio.sleep(13)
            for node in world.nodes.values():
                node.worker.open_gate()
        assert not session.recoveries


@pytest.mark.parametrize("all_hang", [True, False])
@simulated
async def test_servers_that_have_proved_themselves_before_are_tried_before_a_silent_one_is_left(all_hang: bool) -> None:
    """They may hang as it does: what they have computed before the wait says nothing of that."""
    async with pairs(0) as world, world.client() as client, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(client.router.open_session(64, Codec.RAW)) for _ in "1234"]
        dialogues = [Dialogue(each, random.Random(number)) for number, each in enumerate(sessions)]
        for each in dialogues:
            for positions in (9, *[1] * 20):
                await each.step(positions)
        standing, session = client.router.finder.records.standing, sessions[0]
        assert all(standing.is_proven(each.peer, trio.current_time()) for each in world.nodes.values())
        first = session.route[0].peer
        hanging = [each for each in world.nodes.values() if all_hang or each.peer == first]
        for node in hanging:
            node.worker.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialogues[0].step, 1)
            await trio.sleep(13)
            for node in hanging:
                node.worker.open_gate()
        assert [each.lost for each in session.recoveries] == ([] if all_hang else [first])


@simulated
async def test_a_server_that_answers_other_sessions_is_busy_and_is_kept_longer() -> None:
    async with pairs(0) as world, AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client())
        sessions = [await stack.enter_async_context(client.router.open_session(64, Codec.RAW)) for _ in "1234"]
        session = sessions.pop()
        other = next(each for each in sessions if each.route[0].peer == session.route[0].peer)
        own, others = Dialogue(session, random.Random(1)), Dialogue(other, random.Random(2))
        await own.step(9)
        await others.step(9)
        first = session._hops.hops[0]

        def withhold(_peer: PeerId, frame: Frame) -> list[Frame]:
            return [] if frame.type is FrameType.RESULT and frame.session == first.session else [frame]

        world.node(first.hop.peer).network.tamper = withhold
        async with trio.open_nursery() as nursery:
            took_s: list[float] = []

            async def one() -> None:
                took_s.append(await step_s(own))
                nursery.cancel_scope.cancel()

            nursery.start_soon(one)
            while True:
                await trio.sleep(2)
                await others.step(1)
        assert took_s[0] > 15
        assert session.recoveries
        assert not other.recoveries


def mute(world: World, peer: PeerId, withheld: FrameType) -> None:
    """From now on the server never sends an answer of this type."""

    def withhold(_peer: PeerId, frame: Frame) -> list[Frame]:
        return [] if frame.type is withheld else [frame]

    world.node(peer).network.tamper = withhold
