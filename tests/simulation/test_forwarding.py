"""Steps that go from server to server: how long they take, and what happens where servers do not reach each other."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import trio

from llmnode.client.generate import run_blocks
from llmnode.core.ids import Step
from llmnode.core.policy import ClientPolicy, PushPolicy, ServePolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.session.session import open_session
from llmnode.swarm.pool import open_pool
from llmnode.testing import check_coverage, peer_named, seeds
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms
from simulation.world import DELAY_S, FORWARD_S, MODEL, SPANS, Dialogue, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from llmnode.session.hop import SessionHop
    from llmnode.session.router import Router
    from llmnode.testing.world import World

HOPS = len(SPANS)
RELAYED = ClientPolicy(push=PushPolicy(enabled=False))
COMPUTE_S = HOPS * FORWARD_S
SLACK_S = 0.001
DIRECT_S = COMPUTE_S + (HOPS + 1) * DELAY_S
MAX_LENGTH = 120
LONGEST_S = PushPolicy().longest_retry_s + 2 * ServePolicy().connect_timeout_s + 5


@asynccontextmanager
async def swarm_of_one_each(swarm: World) -> AsyncIterator[Router]:
    """A server of each span, named by its number, and a client."""
    for index, span in enumerate(SPANS):
        await swarm.start(f"{index}", span)
    await check_coverage(swarm)
    async with swarm.client() as (router, _):
        yield router


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = trio.current_time()
    await work()
    return trio.current_time() - began


@simulated
async def test_a_step_takes_one_way_less_per_hop_than_through_the_client() -> None:
    async with pairs_of_servers() as swarm:
        async with swarm.session() as (session, _):
            direct_s = await timed(lambda: Dialogue(session, random.Random(1)).step(1))
        async with swarm.session(RELAYED) as (session, _):
            relayed_s = await timed(lambda: Dialogue(session, random.Random(1)).step(1))
    assert direct_s == pytest.approx(COMPUTE_S + (HOPS + 1) * DELAY_S, abs=SLACK_S)
    assert relayed_s == pytest.approx(COMPUTE_S + 2 * HOPS * DELAY_S, abs=SLACK_S)


@simulated
async def test_a_session_opens_and_its_hops_hear_of_each_other_in_one_round_trip() -> None:
    async with world() as swarm, swarm_of_one_each(swarm) as router:
        for is_first in (True, False):  # the first has servers connect to each other
            began_s = trio.current_time()
            async with router.open_session(64, Codec.RAW) as session:
                took_s = trio.current_time() - began_s
                await Dialogue(session, random.Random(1)).step(1)
                assert all(timing.direct for timing in session.timings[1:])
            assert took_s == pytest.approx(2 * DELAY_S, abs=SLACK_S) or is_first


@simulated
async def test_a_hop_whose_new_neighbours_may_not_have_reached_it_is_told_of_the_former_ones_again() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(3)
        state, (first, second, _) = session._hops.state, session._hops.hops
        at = state.epoch, Step(state.step + 10)  # no such step comes, so a late answer is none to a step

        async def set_neighbours(after: SessionHop | None) -> None:
            if (request := first.set_neighbours(None, after, *at, trio.current_time(), quiet=False)) is not None:
                await first.carry_out(request)

        with trio.move_on_after(DELAY_S / 2):  # it is told, and the client does not hear its answer
            await set_neighbours(None)
        await set_neighbours(second)
        await dialogue.step(1)
        assert all(timing.direct for timing in session.timings[1:])
        assert not session.recoveries


@simulated
async def test_hops_compute_different_chunks_of_a_prefill_at_the_same_time() -> None:
    chunks = 6
    policy = ClientPolicy(chunk_tokens=4, chunks_ahead=chunks)
    async with pairs_of_servers() as swarm, swarm.session(policy) as (session, _):
        for node in swarm.nodes.values():
            node.worker.forward_s = 1.0
        took_s = await timed(lambda: Dialogue(session, random.Random(1)).step(4 * chunks))
    assert took_s == pytest.approx((chunks + HOPS - 1) * 1.0 + (HOPS + 1) * DELAY_S, abs=SLACK_S)


@simulated
async def test_chunks_of_a_prompt_overlap_in_generate_too() -> None:
    chunks = 6
    policy = ClientPolicy(chunk_tokens=4, chunks_ahead=chunks)
    async with pairs_of_servers() as swarm, swarm.session(policy) as (session, _):
        for node in swarm.nodes.values():
            node.worker.forward_s = 1.0
        hidden = torch.zeros(4 * chunks, MODEL.hidden_size)
        took_s = await timed(lambda: run_blocks(session, hidden))
    assert took_s == pytest.approx((chunks + HOPS - 1) * 1.0 + (HOPS + 1) * DELAY_S, abs=SLACK_S)


@simulated
async def test_a_prefill_of_more_chunks_than_go_ahead_of_one_another_takes_no_longer_than_they_do() -> None:
    policy = ClientPolicy(chunk_tokens=4, chunks_ahead=3)
    async with pairs_of_servers() as swarm, swarm.session(policy) as (session, _):
        for node in swarm.nodes.values():
            node.worker.forward_s = 1.0
        took_s = await timed(lambda: Dialogue(session, random.Random(1)).step(4 * 8))
        assert not session.recoveries
    assert took_s == pytest.approx((8 + HOPS - 1) * 1.0, abs=8 * (HOPS + 1) * DELAY_S)


@simulated
async def test_servers_that_cannot_reach_each_other_are_joined_by_the_client() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        async with router.open_session(64, Codec.RAW) as session:
            first, second, _ = (hop.peer for hop in session.route)
        swarm.internet.cut(first, second)
        await trio.sleep(30)
        async with router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            for _ in range(3):
                await dialogue.step(2)
            assert not session.recoveries, "nobody is to blame"


@simulated
async def test_servers_that_cannot_reach_each_other_hold_up_no_session_for_long() -> None:
    async with world() as swarm, swarm_of_one_each(swarm) as router:
        swarm.internet.block_dials(peer_named("0"), peer_named("1"))

        async def open_one() -> None:
            async with router.open_session(20, Codec.RAW) as session:
                await Dialogue(session, random.Random(1)).step(1)
                assert not session.recoveries

        async def open_many() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(9):
                    nursery.start_soon(open_one)

        assert await timed(open_many) < 2
        assert await timed(open_one) < 1


@simulated
async def test_a_session_begins_while_its_servers_still_dial_each_other_and_they_push_as_soon_as_they_can() -> None:
    async with world() as swarm, swarm_of_one_each(swarm) as router:
        two = peer_named("0"), peer_named("1")
        swarm.internet.block_dials(*two)
        began_s = trio.current_time()
        async with router.open_session(20, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(1)
            assert trio.current_time() - began_s < ServePolicy().dial_patience_s + 1
            assert [timing.direct for timing in session.timings] == [False, False, True], "the client relays meanwhile"
            await trio.sleep(began_s + 2 - trio.current_time())
            swarm.internet.mend(*two)  # the answer to what was dialled at first
            await trio.sleep(ServePolicy().connect_timeout_s)
            await dialogue.step(1)
            assert [timing.direct for timing in session.timings] == [False, True, True], "asked again once"
            assert not session.recoveries


@simulated
async def test_servers_that_reach_each_other_again_are_not_joined_by_the_client_for_long() -> None:
    async with world() as swarm, swarm_of_one_each(swarm) as router:
        swarm.internet.block_dials(peer_named("0"), peer_named("1"))
        async with router.open_session(20, Codec.RAW):
            pass  # so the server finds out
        swarm.internet.mend(peer_named("0"), peer_named("1"))
        await trio.sleep(2)
        async with router.open_session(20, Codec.RAW) as session:
            step_s = await timed(lambda: Dialogue(session, random.Random(1)).step(1))
    assert step_s == pytest.approx(COMPUTE_S + (HOPS + 1) * DELAY_S, abs=SLACK_S)


@pytest.mark.parametrize("seed", seeds(30))
@simulated
async def test_servers_push_again_once_they_reach_each_other_again_and_nothing_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    async with world(seed) as swarm, swarm_of_one_each(swarm) as router:
        internet, number = swarm.internet, rng.choice([1, 2])
        two = peer_named(f"{number - 1}"), peer_named(f"{number}")
        if never := rng.random() < 0.3:
            internet.block_dials(*two)
        async with router.open_session(MAX_LENGTH, Codec.RAW) as session:
            dialogue = Dialogue(session, rng)
            await dialogue.step(rng.randrange(1, 6))
            if not never:
                rng.choice([internet.cut, internet.cut_one_way])(*two)
            for _ in range(rng.randrange(1, 6)):
                await dialogue.step(rng.choice([1, 1, 3]))
                await trio.sleep(rng.expovariate(0.5))
            assert not session.timings[number].direct
            internet.mend(*two)
            healed_s = trio.current_time()
            while not session.timings[number].direct:
                assert trio.current_time() < healed_s + LONGEST_S
                await trio.sleep(rng.expovariate(1.0))
                await dialogue.go_back(1)
                await dialogue.step(rng.choice([1, 1, 2]))
            assert not session.recoveries
            assert await timed(lambda: dialogue.step(1)) == pytest.approx(DIRECT_S, abs=SLACK_S)


@pytest.mark.parametrize("seed", seeds(10))
@simulated
async def test_a_hop_that_will_never_reach_the_next_is_asked_again_at_the_cost_of_few_round_trips(seed: int) -> None:
    rng = random.Random(seed)
    async with world(seed) as swarm, swarm_of_one_each(swarm) as router:
        swarm.internet.block_dials(peer_named("0"), peer_named("1"))
        async with router.open_session(MAX_LENGTH, Codec.RAW) as session:
            dialogue, took_s = Dialogue(session, rng), []
            await dialogue.step(1)
            for _ in range(MAX_LENGTH - 1):
                took_s.append(await timed(lambda: dialogue.step(1)))
                await trio.sleep(rng.uniform(0.0, 10.0))
            assert not session.recoveries
    through_client_s = DIRECT_S + DELAY_S
    asked = [each for each in took_s if each > through_client_s + SLACK_S]
    assert max(took_s) < through_client_s + 2 * DELAY_S + SLACK_S, "a round trip, and no dial"
    assert 5 < len(asked) < MAX_LENGTH / 4


@simulated
async def test_a_server_hears_of_the_next_hop_from_the_client_if_from_nobody_else() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        for node in swarm.nodes.values():
            for other in swarm.nodes.values():
                if other is not node:
                    node.swarm.view.forget(other.network.peer)
        async with router.open_session(64, Codec.RAW) as session:
            await Dialogue(session, random.Random(1)).step(5)
            assert [timing.direct for timing in session.timings] == [False, True, True]


@simulated
async def test_two_hops_at_one_server_are_joined_by_the_client() -> None:
    async with world() as swarm:
        node = await swarm.start("whole", Span(0, 6))
        peer = node.network.peer
        async with open_pool(swarm.internet.network("client")) as pool:
            connections = {peer: await pool.connect(node.network.addresses)}
            route = (Hop(peer, Span(0, 3)), Hop(peer, Span(3, 6)))
            async with open_session(route, connections, SessionTerms(MODEL, 64, Codec.RAW, ClientPolicy())) as session:
                await Dialogue(session, random.Random(1)).step(5)
                assert [timing.direct for timing in session.timings] == [False, False]
