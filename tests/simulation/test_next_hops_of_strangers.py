"""Honest sessions push from server to server while one stranger has the servers look for next hops without end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy, TurnPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, Dialogue, World, check_coverage, open_world, simulated
from llmnode.testing.exact_blocks import exact_input
from llmnode.testing.hostile import HoleNamer, HostilePlan, RightsAsker
from llmnode.testing.hostile.clients import open_frame, read_all
from llmnode.testing.hostile.next_hops import named_next, one_step
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, OpenRequest, pack, unpack
from llmnode.wire.payload import Codec
from simulation.pushes import neighbours

CONDITIONS = Conditions(delay_s=0.02)
STEPS = 20
FIRST, SECOND = Span(0, 3), Span(3, 6)


async def longest_step_s(world: World) -> float:
    """The longest step of a session of its own."""
    longest_s = 0.0
    async with world.client() as client, client.router.open_session(64, Codec.RAW) as session:
        dialogue = Dialogue(session, random.Random(0))
        for _ in range(STEPS):
            began_s = trio.current_time()
            await dialogue.step(1)
            longest_s = max(longest_s, trio.current_time() - began_s)
    return longest_s


@pytest.mark.parametrize("identities", [1, 3])
@simulated
async def test_a_next_hop_is_dialled_while_a_stranger_names_black_holes(identities: int) -> None:
    """The server has not met it yet. Without a limit, the stranger has all dials of strangers' addresses."""
    async with open_world(conditions=CONDITIONS) as world:
        await world.start("0a", FIRST)
        async with HostilePlan((HoleNamer(identities, 1),)).upon(world):
            await trio.sleep(10)
            later = await world.start("1a", SECOND)
            await trio.sleep(3)
            assert later.peer in world.nodes["0a"].knows
            await longest_step_s(world)
            assert later.server.tally.given_directly >= STEPS - 5


@simulated
async def test_next_hops_that_are_reached_do_not_count() -> None:
    """A client's sessions may have any number of them."""
    policy = ServePolicy(hops_sought_burst=1, hops_sought_per_s=1e-6)
    async with open_world(conditions=CONDITIONS, serve_policy=policy) as world:
        await world.start("0a", FIRST)
        for number in range(3):
            later = await world.start(f"1{number}", SECOND)
            await check_coverage(world)
            await longest_step_s(world)
            assert later.server.tally.given_directly >= STEPS - 5
            world.kill(later.name)


@simulated
async def test_pushes_go_on_while_a_stranger_has_their_server_ask_for_rights() -> None:
    """Servers of the simulation compute a hundred forwards in a second, and real ones more: all limits are lower."""
    usual, scale = ServePolicy(), 16
    wants = TurnPolicy(usual.wants.burst / scale, usual.wants.per_s / scale, usual.wants.shared_per_s / scale)
    burst, per_s = usual.rights_burst // scale, usual.rights_per_s / scale
    policy = ServePolicy(wants=wants, rights_burst=burst, rights_per_s=per_s)
    async with open_world(conditions=CONDITIONS, serve_policy=policy) as world:
        for name, span in (("0a", FIRST), ("1a", SECOND)):
            await world.start(name, span)
        await check_coverage(world)
        async with HostilePlan((RightsAsker(3, 1),)).upon(world):
            await trio.sleep(10)
            for _ in range(3):
                before = world.nodes["1a"].server.tally.given_directly
                assert await longest_step_s(world) < 0.2
                assert world.nodes["1a"].server.tally.given_directly - before >= STEPS - 1


@simulated
async def test_pushes_to_a_strangers_own_server_give_no_questions_for_another_one_back() -> None:
    """The other one gives back only for the pushes that it uses itself."""
    burst, rng = 16, random.Random(0)
    pushing, taking, asking = (SessionId(bytes([number]) * 16) for number in range(1, 4))
    policy = ServePolicy(rights_burst=burst, rights_per_s=1e-6)
    async with open_world(conditions=CONDITIONS, serve_policy=policy) as world:
        first, victim, own = [
            await world.start(name, span) for name, span in (("0a", FIRST), ("1a", SECOND), ("1b", SECOND))
        ]
        await check_coverage(world)
        stranger = world.internet.network("stranger")
        to_own, to_first = (
            await stranger.dial(own.network.addresses[0]),
            await stranger.dial(first.network.addresses[0]),
        )
        async with trio.open_nursery() as nursery:
            for link in (to_own, to_first):
                nursery.start_soon(read_all, link)
            await to_own.send(open_frame(world, own, taking, 60))
            await to_own.send(neighbours(taking, 1, sender="0a"))
            for session in (pushing, asking):
                await to_first.send(open_frame(world, first, session, 60))
            meta = pack(Neighbours("", own.peer, taking, quiet=False, again=False))
            await to_first.send(Frame(FrameType.NEIGHBOURS, pushing, meta=meta))
            await trio.sleep(2)
            for step in range(60):
                await to_first.send(one_step(pushing, step, rng))
                await to_first.send(named_next(asking, step, victim.peer, rng))
                await trio.sleep(0.2)
            nursery.cancel_scope.cancel()
        assert own.server.tally.given_directly > 2 * burst
        asked = sum(len(each.asked) for links in victim.server.desk._links.values() for each in links)
        assert burst - 2 <= asked <= burst


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.FP16], ids=["too long", "of another codec"])
@simulated
async def test_pushes_that_a_strangers_session_drops_buy_no_questions_that_the_next_hop_does_not_expect(
    codec: Codec,
) -> None:
    """Else the next hop looks at no more questions of this server, and takes no pushes meanwhile."""
    burst, length, pushes, rng = 16, 60, 100, random.Random(0)
    pushing, taking, asking = (SessionId(bytes([number]) * 16) for number in range(1, 4))
    policy = ServePolicy(wants=TurnPolicy(2 * burst, 1e-6, 1e-6), rights_burst=burst, rights_per_s=1e-6)
    async with open_world(conditions=CONDITIONS, serve_policy=policy) as world:
        first, victim = [await world.start(name, span) for name, span in (("0a", FIRST), ("1a", SECOND))]
        await check_coverage(world)
        stranger = world.internet.network("stranger")
        to_first, to_victim = [await stranger.dial(each.network.addresses[0]) for each in (first, victim)]
        async with trio.open_nursery() as nursery:
            for link in (to_first, to_victim):
                nursery.start_soon(read_all, link)
            opening = open_frame(world, victim, taking, length)
            request = replace(unpack(OpenRequest, opening.meta), codec=codec)
            await to_victim.send(replace(opening, meta=pack(request)))
            await to_victim.send(neighbours(taking, 1, sender="0a"))
            for session in (pushing, asking):
                await to_first.send(open_frame(world, first, session, length + pushes))
            whole = exact_input(rng, length)
            await to_first.send(Frame(FrameType.STEP, pushing, length=length, payload=whole))
            await trio.sleep(1)
            meta = pack(Neighbours("", victim.peer, taking, quiet=False, again=False))
            await to_first.send(Frame(FrameType.NEIGHBOURS, pushing, meta=meta))
            await trio.sleep(2)
            for number in range(pushes):
                at = Step(1 + number), length + number
                await to_first.send(Frame(FrameType.STEP, pushing, Epoch(0), *at, 1, payload=exact_input(rng, 1)))
                await to_first.send(named_next(asking, number, victim.peer, rng))
                await trio.sleep(0.2)
            nursery.cancel_scope.cancel()
        assert not victim.server.tally.given_directly
        assert await longest_step_s(world) < 0.2
        assert victim.server.tally.given_directly >= STEPS - 1
