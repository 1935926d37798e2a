"""Nodes that change their span while they live: sessions go on elsewhere, right to the bit, and others come."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.adapters import AnnouncedAdapter
from llmnode.core.announcement import PeerState
from llmnode.core.policy import BudgetPolicy, LifePolicy, LinkPolicy
from llmnode.core.route import Hop
from llmnode.core.serving.adapter_shelf import ENTRY_BYTES
from llmnode.core.span import Span
from llmnode.errors import AdapterError, ConfigError, WorkerLost
from llmnode.testing import open_world, seeds
from llmnode.testing.faults import Cast, FaultPlan, Odds
from llmnode.wire.adapter import make_adapter
from llmnode.wire.payload import Codec
from simulation.adapters import drawn_adapter
from simulation.beams import opened, step_all
from simulation.world import MODEL, SPANS, Dialogue, World, kv_is_free, pairs_of_servers, simulated, wander

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.testing.world import ServingNode

LENGTH = 64
STEPS = 30


@asynccontextmanager
async def served() -> AsyncIterator[tuple[World, Dialogue, ServingNode]]:
    """A session, and the node that serves its middle blocks."""
    async with pairs_of_servers() as swarm, swarm.session(max_length=LENGTH) as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        yield swarm, dialogue, swarm.node(session.route[1].peer)


@simulated
async def test_a_node_serves_another_span_under_the_same_identity_and_its_sessions_move() -> None:
    async with served() as (swarm, dialogue, node):
        before = node.worker
        await node.role.change_span(SPANS[0], patience_s=0.0)
        assert (node.state, node.worker.span) == (PeerState.ONLINE, SPANS[0])
        assert node.worker is not before
        began_s = trio.current_time()
        await dialogue.step(1)
        assert trio.current_time() - began_s < 1.0, "its client is told at its next step, and does not find out"
        (recovery,) = dialogue.session.recoveries
        assert (recovery.lost, recovery.span) == (node.peer, SPANS[1])
        for name in ("0a", "0b"):
            swarm.kill(name)
        await dialogue.step(3)
        assert dialogue.session.route[0].peer == node.peer, "now it is needed there"


@simulated
async def test_sessions_have_their_time_to_end_and_no_session_comes_meanwhile() -> None:
    async with served() as (swarm, dialogue, node), trio.open_nursery() as nursery:
        began_s = trio.current_time()
        nursery.start_soon(node.role.change_span, SPANS[2], 30.0)
        await trio.sleep(10)
        assert node.state is PeerState.DRAINING
        await dialogue.step(3)
        assert not dialogue.session.recoveries, "it serves its session"
        async with swarm.session() as (other, _):
            assert other.route[1].peer != node.peer
        await dialogue.session.close()
        await trio.sleep(1)
        assert (node.state, node.role.span) == (PeerState.ONLINE, SPANS[2])
        assert trio.current_time() - began_s < 12, "it does not wait when nobody is left"


@simulated
async def test_while_it_loads_it_is_joining_with_its_new_span_and_refuses() -> None:
    async with served() as (swarm, _, node), trio.open_nursery() as nursery:
        node.source.load_s = 20.0
        nursery.start_soon(node.role.change_span, SPANS[0], 0.0)
        await trio.sleep(10)
        client = swarm.clients["client"]
        (said,) = (each.offer for each in client.view.announcements() if each.peer == node.peer)
        assert (said.state, said.span, said.kv_tokens_free) == (PeerState.JOINING, SPANS[0], 0)
        assert node.server.describe().kv_tokens_free == 0
        async with swarm.session() as (other, _):
            assert node.peer not in {hop.peer for hop in other.route}


@simulated
async def test_a_span_that_does_not_fit_leaves_the_node_with_the_one_before() -> None:
    async with served() as (_, dialogue, node):
        node.source.too_large = {SPANS[0]}
        with pytest.raises(ConfigError, match="do not fit, as told"):
            await node.role.change_span(SPANS[0], 0.0)
        assert (node.state, node.worker.span) == (PeerState.ONLINE, SPANS[1])
        await dialogue.step(1)
        with pytest.raises(ConfigError, match=r"cannot serve blocks \[0, 7\): exact has 6 blocks"):
            await node.role.change_span(Span(0, 7))
        await node.role.change_span(SPANS[2], 0.0)
        assert node.worker.span == SPANS[2]


@simulated
async def test_a_node_that_leaves_changes_no_span_and_who_waits_for_one_is_told() -> None:
    async with served() as (swarm, _, node), trio.open_nursery() as nursery:
        nursery.start_soon(change_until_left, node, 100.0)
        await trio.sleep(1)
        await swarm.drain(node.name, 0.0)
        await change_until_left(node, 0.0)


@simulated
async def test_a_node_may_be_stopped_in_the_middle_of_anything_and_what_comes_later_is_nothing_to_it() -> None:
    """While it says farewell, its drain ends, its worker is lost, or its blocks are loaded."""
    for patience_s in (0.5, 0.0):
        async with served() as (_, _, node):
            node.source.load_s = 0.5
            async with trio.open_nursery() as nursery:
                nursery.start_soon(change_until_left, node, patience_s)
                await trio.sleep(0.1)
                nursery.start_soon(node.role.leave)
                node.source.lose()
                await trio.sleep(1)
            assert node.state is PeerState.LEFT
            await trio.sleep(5)


async def change_until_left(node: ServingNode, patience_s: float | None) -> None:
    with pytest.raises(ConfigError, match="is leaving the swarm"):
        await node.role.change_span(SPANS[0], patience_s)


@simulated
async def test_changes_are_made_one_after_the_other() -> None:
    async with served() as (_, dialogue, node):
        async with trio.open_nursery() as nursery:
            for span in (SPANS[0], SPANS[2], SPANS[1]):
                nursery.start_soon(node.role.change_span, span, 0.1)
        assert node.state is PeerState.ONLINE
        await dialogue.step(1)


async def change_spans(swarm: World, rng: random.Random) -> None:
    """One node of each pair, so that its twin covers the blocks."""
    while True:
        await trio.sleep(rng.uniform(0, 3))
        if (node := swarm.nodes.get(f"{rng.randrange(3)}b")) is not None:
            node.source.load_s, node.source.holds_two = rng.choice([0.0, 1.0]), rng.random() < 0.5
            # It may be told to leave meanwhile, or lose its worker.
            with trio.move_on_after(20), suppress(ConfigError, WorkerLost):
                await node.role.change_span(rng.choice([*SPANS, Span(0, 4), Span(1, 6)]), rng.choice([0.0, 0.5, 2.0]))


async def lose_workers(swarm: World, rng: random.Random) -> None:
    while True:
        await trio.sleep(rng.uniform(0, 6))
        swarm.nodes[rng.choice(sorted(swarm.nodes))].source.lose()


@pytest.mark.parametrize("seed", seeds(30))
@simulated
async def test_sessions_are_right_to_the_bit_while_nodes_change_their_spans_and_lose_their_workers(seed: int) -> None:
    rng = random.Random(seed)
    async with pairs_of_servers(seed) as swarm:
        async with swarm.session(max_length=LENGTH) as (session, _), trio.open_nursery() as nursery:
            nursery.start_soon(change_spans, swarm, rng)
            nursery.start_soon(lose_workers, swarm, rng)
            await wander(Dialogue(session, rng), rng, STEPS, LENGTH)
            nursery.cancel_scope.cancel()
        await kv_is_free(swarm)


@pytest.mark.parametrize("seed", seeds(15))
@simulated
async def test_and_while_anything_else_goes_wrong(seed: int) -> None:
    rng = random.Random(seed)
    async with pairs_of_servers(seed) as swarm:
        plan = FaultPlan.draw(seed, Cast([f"{index}{twin}" for index in range(3) for twin in "ab"]), Odds(tracks=1))
        async with swarm.session(max_length=LENGTH) as (session, _), trio.open_nursery() as nursery:
            nursery.start_soon(change_spans, swarm, rng)
            async with plan.upon(swarm):
                dialogue = Dialogue(session, rng)
                for _ in range(STEPS):
                    await dialogue.step(1)
                    await trio.sleep(rng.choice([0, 0.5, 1]))
            nursery.cancel_scope.cancel()
        await kv_is_free(swarm)


@asynccontextmanager
async def served_by_two() -> AsyncIterator[tuple[World, Dialogue, ServingNode]]:
    """The same, and there is memory for two workers."""
    async with served() as (swarm, dialogue, node):
        node.source.holds_two = True
        yield swarm, dialogue, node


@simulated
async def test_where_memory_allows_a_node_serves_its_former_span_until_the_new_one_is_ready() -> None:
    async with served_by_two() as (swarm, dialogue, node), trio.open_nursery() as nursery:
        node.source.load_s = 20.0
        nursery.start_soon(node.role.change_span, SPANS[0])
        for _ in range(9):
            await trio.sleep(2)
            await dialogue.step(1)
        client = swarm.clients["client"]
        (said,) = (each.offer for each in client.view.announcements() if each.peer == node.peer)
        assert (said.state, said.span, said.moves_to) == (PeerState.ONLINE, SPANS[1], SPANS[0])
        swarm.kill(next(name for name in ("1a", "1b") if name != node.name))
        async with swarm.session() as (other, _):
            assert other.route[1].peer == node.peer, "it takes sessions"
            await Dialogue(other, random.Random(2)).step(4)
        await trio.sleep(5)
        assert (node.state, node.role.span) == (PeerState.ONLINE, SPANS[0])
        assert node.server.former is not None
        for _ in range(3):
            await dialogue.step(1)
        assert not dialogue.session.recoveries, "its session goes on there"
        await dialogue.session.close()
        await trio.sleep(1)
        assert node.server.former is None, "it does not wait when nobody is left"


@simulated
async def test_a_session_of_the_former_span_can_be_copied_into_one_of_the_new_span() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 1) as (first,):
        await first.step(20)
        node = swarm.node(first.session.route[1].peer)
        node.source.holds_two = True
        await node.role.change_span(Span(2, 5))
        swarm.kill(next(name for name in ("1a", "1b") if name != node.name))
        await trio.sleep(5)
        async with router.open_session(LENGTH, Codec.RAW, first.session) as session:
            assert Hop(node.peer, SPANS[1]) in session.route
            second = Dialogue(session, random.Random(2))
            await first.fork(second)
            await step_all([first, second], 2)
        assert node.server.former is not None
        assert not first.session.recoveries


@simulated
async def test_sessions_of_the_former_span_go_on_elsewhere_when_their_time_is_over() -> None:
    async with served_by_two() as (_, dialogue, node):
        await node.role.change_span(SPANS[0], 10.0)
        await dialogue.step(1)
        assert not dialogue.session.recoveries
        await trio.sleep(11)
        began_s = trio.current_time()
        await dialogue.step(1)
        assert trio.current_time() - began_s < 1.0
        (recovery,) = dialogue.session.recoveries
        assert (recovery.lost, recovery.span) == (node.peer, SPANS[1])
        assert node.server.former is None


@simulated
async def test_a_second_span_that_cannot_be_loaded_or_is_not_confirmed_costs_no_session_anything() -> None:
    async with served_by_two() as (_, dialogue, node):

        async def no() -> bool:
            return False

        node.source.too_large = {SPANS[0]}
        with pytest.raises(ConfigError, match="do not fit, as told"):
            await node.role.change_span(SPANS[0])
        assert not await node.role.change_span(SPANS[2], confirm=no)
        async with trio.open_nursery() as nursery:
            node.source.load_s = 20.0
            nursery.start_soon(node.role.change_span, SPANS[2])
            await trio.sleep(1)
            node.role.stay()
        assert (node.state, node.role.span, node.worker.span) == (PeerState.ONLINE, SPANS[1], SPANS[1])
        await dialogue.step(1)
        assert not dialogue.session.recoveries
        node.source.load_s = 0.0
        assert await node.role.change_span(SPANS[2], 0.0)


@simulated
async def test_a_node_that_loses_its_worker_while_it_moves_serves_its_former_span_again() -> None:
    async with served_by_two() as (_, dialogue, node):
        node.source.load_s = 5.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lost_while_it_moves, node)
            await trio.sleep(1)
            node.source.lose()
        assert (node.state, node.role.span) == (PeerState.ONLINE, SPANS[1])
        await dialogue.step(1)


async def lost_while_it_moves(node: ServingNode) -> None:
    with pytest.raises(WorkerLost, match="lost while it loaded blocks"):
        await node.role.change_span(SPANS[0])


@simulated
async def test_a_node_whose_adapters_fit_its_memory_only_once_loads_alone() -> None:
    adapter = drawn_adapter(random.Random(1))
    budget = BudgetPolicy(adapter_bytes=3 * ENTRY_BYTES // 2)
    async with open_world(link_policy=LinkPolicy(budget=budget)) as swarm:
        node = await swarm.start("0", SPANS[0], adapters={AnnouncedAdapter("own", adapter.digest, 4): adapter})
        node.source.holds_two = True
        assert await node.role.change_span(SPANS[1])
        assert (node.state, node.worker.span) == (PeerState.ONLINE, SPANS[1])
        assert node.worker.executor.adapters[adapter.digest].keys() == {2, 3}
        assert node.server.former is None and node.server.prepared is None


@pytest.mark.parametrize("holds_two", [False, True], ids=["alone", "beside"])
@simulated
async def test_blocks_that_the_nodes_adapter_does_not_fit_leave_it_with_those_before(holds_two: bool) -> None:
    wrong = make_adapter(MODEL.digest, {block: (bytes(8), 2 if block < 4 else 3) for block in range(MODEL.blocks)})
    own = {AnnouncedAdapter("own", wrong.digest, 4): wrong}
    async with pairs_of_servers() as swarm:
        node = await swarm.start("own", SPANS[1], said_us=1, adapters=own)
        node.source.holds_two = holds_two
        async with swarm.session(max_length=LENGTH) as (session, _):
            assert session.route[1].peer == node.peer
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(2)
            with pytest.raises(AdapterError, match=r"Is it for exact\?"):
                await node.role.change_span(SPANS[2], 0.0)
            assert (node.state, node.worker.span) == (PeerState.ONLINE, SPANS[1])
            await dialogue.step(2)
            assert bool(session.recoveries) == (not holds_two)
        assert node.worker.executor.adapters[wrong.digest].keys() == {2, 3}


@simulated
async def test_a_node_may_be_stopped_while_it_loads_beside_what_it_serves() -> None:
    for holds_a_lock in (False, True):
        async with served_by_two() as (swarm, _, node):
            node.source.load_s, node.source.gate = 1.0, trio.Event() if holds_a_lock else None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(change_until_left, node, None)
                await trio.sleep(0.5)
                await swarm.drain(node.name, 0.0)
            assert node.state is PeerState.LEFT


@pytest.mark.parametrize("load_s", [20.0, 0.0], ids=["loading", "loaded"])
@simulated
async def test_a_move_that_is_wanted_while_the_one_before_is_still_given_up_is_made(load_s: float) -> None:
    async with served_by_two() as (_, dialogue, node):
        node.source.load_s, node.source.drop_s = load_s, 3.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(node.role.change_span, SPANS[0], confirm=trio.sleep_forever))
            await trio.sleep(1)
            node.role.stay()
            assert await node.role.change_span(SPANS[2])
        assert (node.state, node.worker.span) == (PeerState.ONLINE, SPANS[2])
        await dialogue.step(1)
        assert not dialogue.session.recoveries


@simulated
async def test_a_move_that_is_given_up_while_it_waits_for_the_one_before_loads_nothing() -> None:
    async with served_by_two() as (_, dialogue, node), trio.open_nursery() as nursery:
        node.source.drop_s = 3.0
        for span in (SPANS[0], SPANS[2]):
            nursery.start_soon(partial(node.role.change_span, span, confirm=trio.sleep_forever))
            await trio.sleep(1)
            node.role.stay()
            await trio.sleep(0.5)
        await trio.sleep(5)
        assert (node.state, node.worker.span) == (PeerState.ONLINE, SPANS[1])
        await dialogue.step(1)


@simulated
async def test_blocks_that_are_not_loaded_in_time_are_given_up_and_what_is_decided_just_in_time_is_done() -> None:
    async def no() -> bool:
        await trio.sleep(LifePolicy().load_beside_s - 1)
        return False

    async with open_world() as swarm:
        node = await swarm.start("0", SPANS[0])
        node.source.holds_two, node.source.drop_s, node.source.gate = True, 5.0, trio.Event()
        with pytest.raises(ConfigError, match="were not loaded within 3600 s"):
            await node.role.change_span(SPANS[1])
        assert (node.state, node.role.span) == (PeerState.ONLINE, SPANS[0])
        node.source.gate.set()
        with trio.fail_after(LifePolicy().load_beside_s + 10):
            assert not await node.role.change_span(SPANS[1], confirm=no)
            assert await node.role.change_span(SPANS[1])
