"""A client that is served well tries newcomers beside its sessions: it finds a faster one, and waits for none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.policy import ClientPolicy, LinkPolicy, StandingPolicy, TrialPolicy
from llmnode.core.span import Span
from llmnode.testing import Conditions, Dialogue, open_world, seeds, simulated
from llmnode.testing.hostile import HostilePlan, Silent
from llmnode.wire.frame import FrameType
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from llmnode.testing.world import SimulatedClient

ALL_BLOCKS = Span(0, 6)
ALWAYS = replace(ClientPolicy(), standing=replace(StandingPolicy(), explored_share=1.0))
PROVES = StandingPolicy().proven_positions + 1


async def timed_session(client: SimulatedClient, steps: int = 4) -> float:
    """The time that it takes, in seconds."""
    began_s = trio.current_time()
    async with client.router.open_session(64, Codec.RAW) as session:
        dialogue = Dialogue(session, random.Random(0))
        for _ in range(steps):
            await dialogue.step(1)
    return trio.current_time() - began_s


@pytest.mark.parametrize("withholds", [FrameType.RESULT, FrameType.OPENED])
@pytest.mark.parametrize("groups", [1, 16])
@simulated
async def test_servers_that_hang_cost_no_session_more_than_a_moment(withholds: FrameType, groups: int) -> None:
    plan = HostilePlan((Silent(16, groups, ALL_BLOCKS, 1, withholds),))
    async with open_world(0, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        for name, span in {"0a": Span(0, 3), "1a": Span(3, 6)}.items():
            await world.start(name, span)
        async with world.client(ALWAYS) as client:
            usual_s = await timed_session(client, PROVES)
            async with plan.upon(world):
                while len(client.router.finder._candidates()) < 18:
                    await client.router.finder.wait_changed()
                took_s = [await timed_session(client, PROVES) for _ in range(20)]
            assert max(took_s) < usual_s + TrialPolicy().explored_s + 0.5
            assert sum(took_s) < 20 * usual_s + 2 * TrialPolicy().explored_s + 1, "the same are not tried each time"


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_faster_newcomer_is_found(seed: int) -> None:
    async with open_world(seed, conditions=Conditions(delay_s=0.02)) as world:
        slow = await world.start("0a", ALL_BLOCKS, said_us=20_000)
        slow.worker.slower_by_s = 0.12
        async with world.client(ALWAYS) as client:
            await timed_session(client, PROVES)
            fast = await world.start("0b", ALL_BLOCKS, said_us=100)
            while len(client.router.finder._candidates()) < 2:
                await client.router.finder.wait_changed()
            await timed_session(client)
            await timed_session(client)
            assert [hop.peer for hop in client.router.route] == [fast.peer]


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_identities_at_one_address_have_one_turn_of_the_trials_whatever_they_announce(seed: int) -> None:
    """A faster newcomer is found in the first two trials, beside eight that name addresses of others first."""
    policy = replace(ALWAYS, trials=replace(TrialPolicy(), explored=2))
    async with open_world(seed, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        slow = await world.start("0a", ALL_BLOCKS, said_us=20_000)
        slow.worker.slower_by_s = 0.12
        async with world.client(policy) as client:
            await timed_session(client, PROVES)
            silent = Silent(8, 1, ALL_BLOCKS, 1, FrameType.OPENED)
            async with HostilePlan((silent,)).upon(world):
                for number, name in enumerate(silent.names):
                    await trio.testing.wait_all_tasks_blocked()
                    node = world.nodes[name]
                    node.network.claimed_hosts = [f"7.7.{number}.7", silent.host(number)]
                    node.role.announce()
                fast = await world.start("0b", ALL_BLOCKS, said_us=100)
                view = client.router.swarm.view
                while not (fast.peer in view and sum(len(each.addresses) > 1 for each in view.announcements()) == 8):
                    await client.router.finder.wait_changed()
                await timed_session(client)
                await timed_session(client)
                assert [hop.peer for hop in client.router.route] == [fast.peer]
