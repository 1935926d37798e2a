"""Honest sessions push from server to server while one stranger has the servers look for next hops without end."""

from __future__ import annotations

import random

import pytest
import trio

from llmnode.core.policy import ServePolicy, TurnPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, Dialogue, World, check_coverage, open_world, simulated
from llmnode.testing.hostile import HoleNamer, HostilePlan, RightsAsker
from llmnode.wire.payload import Codec

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
