"""A ban lasts for some times what the client has waited for the peer. It is only an order of preference."""

from __future__ import annotations

import random

import pytest
import trio

from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerTimeout, PeerUnreachable
from llmnode.testing import Conditions, Dialogue, open_world, peer_named, simulated
from llmnode.testing.hostile import HostilePlan, Silent
from llmnode.wire.frame import FrameType
from llmnode.wire.payload import Codec
from simulation.world import SPANS, pairs_of_servers

POLICY = ClientPolicy()
BLOCKS = Span(0, 6)
COST_S = 16.0


@pytest.mark.parametrize("withholds", [FrameType.OPENED, FrameType.RESULT, FrameType.TRUNCATED])
@simulated
async def test_a_silent_server_is_banned_for_some_times_what_it_was_waited_for(withholds: FrameType) -> None:
    plan = HostilePlan((Silent(1, 1, BLOCKS, 1, withholds),))
    async with open_world(0, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        await world.start("honest", BLOCKS)
        async with plan.upon(world), world.client() as client:
            finder, began_s = client.router.finder, trio.current_time()
            async with client.router.open_session(64, Codec.RAW) as session:
                dialogue = Dialogue(session, random.Random(0))
                await dialogue.step(9)
                if withholds is FrameType.TRUNCATED:
                    await dialogue.go_back(3)
                await dialogue.step(1)
            passed_s = trio.current_time() - began_s
            ((failed_s, silent, waited_s),) = finder.failures  # type: ignore[attr-defined]
            assert passed_s - 2 < waited_s < passed_s, "the session took little longer than this wait"
            length_s = finder.records.bans.left_s(silent, failed_s)
            assert length_s == pytest.approx(POLICY.route.ban_times * waited_s)
            assert length_s > POLICY.route.ban_s


@pytest.mark.parametrize("is_new", [True, False])
@simulated
async def test_where_all_have_failed_those_are_used_at_once_that_cost_little(is_new: bool) -> None:
    """An honest server that was away once, or slow, is back, however long its ban lasts, if others cost more."""
    async with pairs_of_servers() as world, world.client() as (router, _):
        finder, slow = router.finder, [peer_named(f"{span}a") for span in range(3)]
        for peer in slow:
            finder.report(PeerTimeout("no RESULT", peer=peer).after(COST_S))
        for span in range(3):
            finder.report(PeerTimeout("no RESULT", peer=peer_named(f"{span}b")).after(2.0))
        for _ in range(20):
            if is_new:
                route, _ = await finder.connected_route({}, 0)
            else:
                route, _ = await finder.find(SPANS[1], 0, (), hurry=True)
            assert not {hop.peer for hop in route} & set(slow)
        if not is_new:
            ((hop,), _) = await finder.find(SPANS[1], 0, {peer_named("1b")}, hurry=True)
            assert hop.peer == slow[1], "it is used if nobody else has the blocks"


@simulated
async def test_bans_that_end_almost_together_count_as_equal() -> None:
    async with pairs_of_servers() as world, world.client() as (router, _):
        for name in ("1a", "1b"):
            router.finder.report(PeerUnreachable("gone", peer=peer_named(name)))
            await trio.sleep(POLICY.route.ban_s / 4)
        announcements = router.finder.holders()
        assert len(router.finder.records.good(announcements)) == 4
        assert len(router.finder.records.good_or_soon(announcements, SPANS[1])) == 6
        assert len(router.finder.records.good_or_soon(announcements, SPANS[0])) == 4
