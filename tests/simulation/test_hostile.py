"""Honest sessions in a swarm with hostile peers: they end well, and nobody honest pays for what others do."""

from __future__ import annotations

import random

import pytest
import trio

from llmnode.core.policy import BudgetPolicy, LinkPolicy, ServePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerUnreachable
from llmnode.testing import Conditions, open_world, peer_named, seeds, simulated
from llmnode.testing.hostile import (
    ALL_ROLES,
    OPENS_WITHIN_S,
    HoleNamer,
    HostilePlan,
    HostileRole,
    KvHog,
    RightsAsker,
    ViewStuffer,
    check_dials,
    check_memory,
    check_no_wrong_ban,
    check_sessions_end_well,
)
from llmnode.testing.hostile.laws import SESSION_WITHIN_S
from llmnode.wire.frame import Frame, FrameType

LINKS = LinkPolicy(budget=BudgetPolicy(memory_bytes=3 << 19, connection_bytes=8 << 10, links=40))
SWARM = SwarmPolicy(view_peers=48)
SPANS = [Span(0, 3), Span(3, 6)]
HONEST = ("0a", "0b", "1a", "1b")


async def survive(plan: HostilePlan, seed: int, opens_within_s: float = SESSION_WITHIN_S) -> None:
    """Two servers hold each span of the model. A client has three sessions while the plan is carried out."""
    conditions = Conditions(delay_s=0.02)
    async with open_world(seed, conditions=conditions, link_policy=LINKS, swarm_policy=SWARM) as world:
        for name in HONEST:
            await world.start(name, SPANS[int(name[0])])
        await trio.sleep(1)
        async with plan.upon(world), world.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(check_memory, world, HONEST)
            await check_sessions_end_well(client, 3, seed, opens_within_s)
            nursery.cancel_scope.cancel()
        check_no_wrong_ban(client.router.finder, [peer_named(name) for name in HONEST])  # type: ignore[arg-type]
        check_dials(world.internet.dials, plan.identities, LINKS.dials)


@pytest.mark.parametrize("kind", [*ALL_ROLES, HoleNamer, RightsAsker])  # the seeds of others have none of these two
@pytest.mark.parametrize("seed", seeds(5))
@simulated
async def test_honest_sessions_end_well_beside(kind: type[HostileRole], seed: int) -> None:
    await survive(HostilePlan.draw(seed, [kind]), seed)


@pytest.mark.parametrize("uses", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("seed", seeds(10))
@simulated
async def test_a_session_opens_in_time_while_one_address_group_holds_all_kv(uses: bool, seed: int) -> None:
    plan = HostilePlan((KvHog(random.Random(seed).choice((2, 8)), 1, everywhere=True, uses=uses),))
    await survive(plan, seed, OPENS_WITHIN_S)


@pytest.mark.parametrize("seed", [*seeds(54), 335])  # three servers cost 16 s each, and come round again
@simulated
async def test_honest_sessions_end_well_beside_several_roles(seed: int) -> None:
    await survive(HostilePlan.draw(seed), seed)


@pytest.mark.parametrize("hosts", [1, 8])
@simulated
async def test_a_client_tries_few_of_the_peers_that_strangers_invent(hosts: int) -> None:
    """Each invented one says that it has all blocks, and is faster than any server."""
    plan = HostilePlan((ViewStuffer(8, hosts, sybils=60),))
    async with open_world(7, conditions=Conditions(delay_s=0.02)) as world:
        for name in HONEST:
            await world.start(name, SPANS[int(name[0])])
        await trio.sleep(1)
        async with plan.upon(world), world.client() as client:
            finder = client.router.finder
            await check_sessions_end_well(client, 1, 7)
            await trio.sleep(5)
            assert len(finder.swarm.view.of_model(world.model.digest)) > 100
            await check_sessions_end_well(client, 10, 7, 5)
            assert len(finder.banned) <= 24, "the inventions were tried one after the other"  # type: ignore[attr-defined]
        check_no_wrong_ban(finder, [peer_named(name) for name in HONEST])  # type: ignore[arg-type]


@simulated
async def test_malformed_frames_cost_the_link_and_no_link_of_others_at_the_same_address() -> None:
    malformed = Frame(FrameType.DESCRIBE, meta=b"not empty")
    async with open_world() as world:
        address = (await world.start("0a", SPANS[0])).network.addresses[0]
        rude, polite = (world.internet.network(name, "9.9.9.9") for name in ("rude", "polite"))
        kept, link = await polite.dial(address), await rude.dial(address)
        for _ in range(ServePolicy().malformed_burst):
            await link.send(malformed)
            assert (await link.receive()).type is FrameType.REFUSAL
        await link.send(malformed)
        await link.receive()
        with pytest.raises(PeerUnreachable):
            await link.receive()
        link = await rude.dial(address)
        await link.send(malformed)
        await link.receive()
        with pytest.raises(PeerUnreachable):
            await link.receive()
        await kept.send(Frame(FrameType.DESCRIBE))
        assert (await kept.receive()).type is FrameType.DESCRIPTION
        await trio.sleep(1 / ServePolicy().malformed_per_s)
        await kept.send(malformed)
        assert (await kept.receive()).type is FrameType.REFUSAL
        await kept.send(Frame(FrameType.DESCRIBE))
        assert (await kept.receive()).type is FrameType.DESCRIPTION
