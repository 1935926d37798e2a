"""The checks see what they are for: each fails in a world where what it checks does not hold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy
from llmnode.core.route import Hop
from llmnode.errors import PeerUnreachable
from llmnode.testing import (
    Dialogue,
    before_deadline,
    check_coverage,
    check_kv_is_free,
    check_no_banned_peer,
    open_world,
    peer_named,
    simulated,
)
from simulation.world import SPANS, pairs_of_servers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.testing import World

POLICY = ClientPolicy()


@simulated
async def test_an_undisturbed_session_is_right_to_the_bit() -> None:
    async with pairs_of_servers() as world, world.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        for positions in (20, 1, 1, 5):
            await dialogue.step(positions)
        await dialogue.go_back(13)
        await dialogue.step(2)
        assert not session.recoveries


@simulated
async def test_an_answer_that_is_wrong_by_a_bit_is_noticed() -> None:
    async with pairs_of_servers() as world, world.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        worker = world.node(session.route[1].peer).worker
        ((name, kept),) = worker.executor._kept.items()
        worker.executor._kept[name] = kept[:-1] + bytes([kept[-1] ^ 1])
        with pytest.raises(AssertionError, match="wrong at position 6"):
            await dialogue.step(1)


@simulated
async def test_a_step_that_never_ends_is_noticed() -> None:
    async with pairs_of_servers() as world, world.session() as (session, _):
        with pytest.raises(AssertionError, match="neither a result nor an error"), before_deadline(POLICY, session):
            await trio.sleep_forever()


@simulated
async def test_kv_that_is_kept_is_noticed() -> None:
    async with pairs_of_servers() as world:
        async with world.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(1)
            with pytest.raises(AssertionError, match="64 positions, 1 sessions"):
                await check_kv_is_free(world)
        await check_kv_is_free(world)
        world.nodes["0a"].worker.executor.occupy(100)  # of which no session is to blame
        await check_kv_is_free(world)


@pytest.mark.parametrize("hurry", [False, True])
@simulated
async def test_a_banned_peer_on_a_route_is_noticed_unless_it_is_all_there_is(hurry: bool) -> None:
    async with pairs_of_servers() as world, world.client() as (router, _):
        for name in ("1a", "1b"):
            router.finder.report(PeerUnreachable("gone", peer=peer_named(name)))
        router.finder.records.good = list  # type: ignore[method-assign, assignment]
        await trio.sleep(POLICY.route.ban_s / 2)
        await router.finder.find(SPANS[1], 0, (), hurry=hurry)
        if hurry:
            check_no_banned_peer(router.finder, POLICY)
        else:
            with pytest.raises(AssertionError, match="were banned"):
                check_no_banned_peer(router.finder, POLICY)


@simulated
async def test_the_checks_count_bans_as_the_router_does() -> None:
    rng = random.Random(1)
    async with open_world() as world:  # of no more servers: their news of many minutes take seconds
        peers = [(await world.start(name, SPANS[0])).peer for name in ("0a", "0b")]
        await check_coverage(world)
        async with world.client() as (router, _):
            banned = 0
            for _ in range(150):
                await trio.sleep(rng.expovariate(1 / rng.choice([0.5, 5, 20])))
                if rng.random() < 0.5:
                    router.finder.report(PeerUnreachable("gone", peer=rng.choice(peers)))
                for peer in peers:
                    (announced,) = [each for each in router.swarm.view.announcements() if each.peer == peer]
                    router.finder.found = [(trio.current_time(), len(router.finder.failures), (Hop(peer, SPANS[0]),))]
                    if is_banned := not router.finder.records.good([announced]):
                        with pytest.raises(AssertionError):
                            check_no_banned_peer(router.finder, POLICY)
                    else:
                        check_no_banned_peer(router.finder, POLICY)
                    banned += is_banned
        assert 30 < banned < 270


async def _forget(world: World) -> None:
    world.nodes["0a"].swarm.view.forget(peer_named("1a"))
    world.internet.partition([peer_named("0a")], [node.peer for node in world.nodes.values() if node.name != "0a"])


async def _believe_in_the_dead(world: World) -> None:
    world.kill("1a")
    world.nodes["0a"].swarm.view.drop_expired = lambda _now_ms: []  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [_forget, _believe_in_the_dead])
@simulated
async def test_a_view_that_is_wrong_is_noticed(spoil: Callable[[World], Awaitable[None]]) -> None:
    async with pairs_of_servers() as world:
        await check_coverage(world)
        await spoil(world)
        with pytest.raises(AssertionError, match=r"0a .*peer-1a"):
            await check_coverage(world)
