"""Sessions that become copies of one another, through real serving and client code, while peers fail by a plan.

The arithmetic is exact, as in test_chaos.py. An answer is right to the bit only if every copy is right. `test_forks.py`
has the faults one by one.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import RecoveryPolicy, TrustPolicy
from llmnode.core.texts.beams import sessions_of_rows
from llmnode.errors import LocalProtocolError
from llmnode.testing import FaultPlan, Odds, check_no_banned_peer, seeds
from simulation.beams import opened, step_all
from simulation.chaos import CAST, KINDS, LONGEST_OUTAGE_S, MAX_LENGTH, POLICY, WEATHERS, open_at_last
from simulation.test_receipts import audited
from simulation.world import (
    ALL_BLOCKS,
    DELAY_S,
    KV_TOKENS,
    SPANS,
    Dialogue,
    World,
    kv_is_free,
    pairs_of_servers,
    simulated,
    world,
)

if TYPE_CHECKING:
    pass


BEAMS = 3
TICK_S = 0.001


def forwards(swarm: World) -> int:
    return sum(node.worker.executor.forwards for node in swarm.nodes.values())


# Drawn from a seed


@pytest.mark.parametrize("seed", seeds(68), ids=lambda seed: f"seed-{seed}-")
@simulated
async def test_beams_outlive_whatever_befalls_their_servers(seed: int) -> None:
    rng = random.Random(seed)
    plan = FaultPlan.draw(seed, CAST, Odds(rng.randrange(1, 4), longest_s=LONGEST_OUTAGE_S, kinds=KINDS))
    policy = replace(POLICY, recovery=RecoveryPolicy(upstream_logs=rng.random() < 0.7))
    async with pairs_of_servers(seed, rng.choice(WEATHERS)) as swarm, swarm.client(policy) as (router, _):
        async with plan.upon(swarm), AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(open_at_last(router)) for _ in range(BEAMS)]
            beams = [Dialogue(session, rng, policy=policy) for session in sessions]
            for _ in range(15):
                if rng.random() < 0.7:
                    beams = await _reorder(beams, [rng.randrange(BEAMS) for _ in beams])
                if rng.random() < 0.2:
                    beam = rng.choice(beams)
                    await beam.go_back(rng.randrange(beam.session.position + 1))
                await step_all(beams, rng.choice([1, 1, 1, 2, 7]) if _longest(beams) + 7 <= MAX_LENGTH else 1)
                await trio.sleep(rng.expovariate(1 / 0.3))
        check_no_banned_peer(router.finder, policy)
        await kv_is_free(swarm)


async def _reorder(beams: list[Dialogue], sources: list[int]) -> list[Dialogue]:
    """Copy sessions to the rows' new sources, as a cache does."""
    rows = sessions_of_rows(sources)
    for row, source in zip(rows, sources, strict=True):
        if row != source:
            await beams[source].fork(beams[row])
    return [beams[row] for row in rows]


def _longest(beams: list[Dialogue]) -> int:
    return max(beam.session.position for beam in beams)


# One by one


@simulated
async def test_copies_go_their_own_ways_and_their_source_stays_as_it_is() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 3, beside=True) as beams:
        await beams[0].step(20)
        await beams[1].step(30)  # it is longer than its new source, and different; the third one is empty
        await beams[0].session.fork([beam.session for beam in beams[1:]])
        for copy in beams[1:]:
            copy.now_as(beams[0])
        await step_all(beams, 3)
        await beams[2].fork(beams[0])
        await step_all(beams, 12)
        assert not [beam.session.recoveries for beam in beams if beam.session.recoveries]


@simulated
async def test_a_fork_at_the_same_peers_takes_one_round_trip_and_computes_nothing() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await step_all(beams, 20)
        computed, began = forwards(swarm), trio.current_time()
        await beams[0].fork(beams[1])
        assert trio.current_time() - began == pytest.approx(2 * DELAY_S, abs=TICK_S)
        assert forwards(swarm) == computed
        await step_all(beams)


@simulated
async def test_to_become_what_one_is_already_costs_nothing() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await beams[0].step(20)
        await beams[0].fork(beams[1])
        began = trio.current_time()
        await beams[0].fork(beams[1])
        await beams[1].fork(beams[0])
        assert trio.current_time() == began
        await beams[1].step(1)
        await beams[0].fork(beams[1])  # this one goes back
        await step_all(beams)


@simulated
async def test_only_what_is_not_shared_is_copied() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await beams[0].step(20)
        await beams[0].fork(beams[1])
        await step_all(beams)
        await beams[1].fork(beams[0])
        await beams[0].step(2)
        await beams[1].go_back(6)
        await beams[1].step(1)
        await beams[0].fork(beams[1])
        await step_all(beams)
        for hop in beams[0].session.route:
            copied = swarm.node(hop.peer).worker.executor.forks
            assert copied == [(0, 20), (20, 21), (8, 23)], "of the prompt's chunks of 8, the second one was cut"


@simulated
async def test_a_copy_moves_to_the_peers_of_its_source() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 6) as beams:
        assert len({beam.session.route for beam in beams}) > 1, "equal peers are chosen by chance"
        await step_all(beams, 20)
        computed = forwards(swarm)
        for copy in beams[1:]:
            await beams[0].fork(copy)
        assert forwards(swarm) == computed
        assert {beam.session.route for beam in beams} == {beams[0].session.route}
        await step_all(beams, 2)
        assert sum(node.worker.kv_tokens_free for node in swarm.nodes.values()) == 6 * KV_TOKENS - 6 * 3 * 64


@simulated
async def test_a_copy_takes_one_peer_for_the_several_that_it_had() -> None:
    async with world() as swarm:
        for index, span in enumerate(SPANS):
            await swarm.start(f"part{index}", span)
        await trio.sleep(10)
        async with swarm.client() as (router, _), opened(router, 1) as (parts,):
            await swarm.start("whole", ALL_BLOCKS)
            await trio.sleep(10)
            async with opened(router, 1) as (whole,):
                assert [len(each.session.route) for each in (parts, whole)] == [3, 1]
                await step_all([parts, whole], 10)
                await whole.fork(parts)
                assert parts.session.route == whole.session.route
                await step_all([parts, whole])
        await kv_is_free(swarm)


@simulated
async def test_what_cannot_be_a_copy_is_our_bug() -> None:
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(pairs_of_servers())
        router, _ = await stack.enter_async_context(swarm.client())
        (source,) = await stack.enter_async_context(opened(router, 1))
        (short,) = await stack.enter_async_context(opened(router, 1, max_length=10))
        await source.step(11)
        with pytest.raises(LocalProtocolError):
            await source.session.fork([short.session])
        await source.go_back(1)
        await source.fork(short)
        assert short.session.position == short.session.max_length


@simulated
async def test_who_computed_a_copy_is_signed_by_its_source_until_the_fork_and_by_itself_from_there() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2) as beams:
        await beams[0].step(20)
        await beams[1].step(30)
        await beams[0].fork(beams[1])
        await step_all(beams, 3)
        swarm.kill(str(beams[0].session.route[1].peer).removeprefix("peer-"))
        await step_all(beams)
        for beam, first in zip(beams, (0, 20), strict=True):
            await beam.session.verify()
            assert beam.session.receipts is not None
            assert beam.session.receipts.verified == 24
            found = audited(swarm, beam.session)
            assert (found.positions, found.problems) == ((first, 24), [])


@simulated
async def test_a_server_that_did_not_sign_what_was_copied_is_replaced_in_the_copy_too() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        liar = beams[0].session.route[1].peer
        node = swarm.node(liar)
        sign = node.network.sign
        node.network.sign = lambda _message: bytes(64)  # type: ignore[method-assign]
        await beams[0].step(1)
        node.network.sign = sign  # type: ignore[method-assign]
        await beams[0].fork(beams[1])
        for _ in range(2 * TrustPolicy().unverified_steps):
            await step_all(beams)
        assert [[each.lost for each in beam.session.recoveries] for beam in beams] == [[liar]] * 2
