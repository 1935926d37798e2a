"""Microbatches are split over servers of the same blocks by what these do, whatever they say, and none waits idle."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.peers.pass_loads import AT_FIRST, Holder, Kind, pass_weight
from llmnode.core.policy import ClientPolicy, PassPolicy, SpotCheckPolicy
from llmnode.core.route import HopCost
from llmnode.core.span import Span
from llmnode.session import passes
from llmnode.session.pass_routes import HOLDERS
from llmnode.session.passes import SwarmPasses
from llmnode.session.peer_records import PeerRecords
from llmnode.testing import Conditions
from llmnode.testing.network import peer_named
from llmnode.wire.frame import FrameType
from llmnode.wire.payload import Codec
from simulation.passes import (
    PassTime,
    drawn,
    expected_gradient,
    expected_output,
    nothing_is_left,
    take_time,
    there_and_back,
)
from simulation.world import ALL_BLOCKS, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.testing import World
    from llmnode.wire.frame import Frame

POSITIONS = 32
"""Those of each microbatch."""
BATCHES = 16
MANY = 64
LONGEST_PASS_S = 20.0
"""A client waits this long for a microbatch at a server that has answered none."""
POSITION_S = 1e-3
"""The time of a position in one block, at a server that is not slower than others."""
PASS_S = POSITION_S * POSITIONS * len(ALL_BLOCKS)

IMPATIENT = ClientPolicy(passes=PassPolicy(longest_s=LONGEST_PASS_S))


class Twins:
    """Servers of all blocks. A server may be slower than others, by a factor."""

    def __init__(self, swarm: World, client: SwarmPasses, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = client
        self.swarm = swarm
        self._monkeypatch = monkeypatch
        self.times: dict[str, PassTime] = {}

    async def start(self, name: str, times: float, says: float) -> None:
        """It says that it is slower by the factor `says`. In the end the client has heard of it."""
        await self.swarm.start(name, ALL_BLOCKS, said_us=round(1e6 * POSITION_S * says))
        self.take(name, times)
        await trio.sleep(5)

    def take(self, name: str, times: float) -> None:
        self.times[name] = take_time(self.swarm.nodes[name].worker, times * POSITION_S, self._monkeypatch)

    async def forward(self, batches: int = BATCHES) -> Done:
        """That number of microbatches, and the outputs are right."""
        lengths = [POSITIONS] * batches
        hidden = drawn(1, sum(lengths))
        began_s = self._begin()
        output, _ = await self.client.outputs(ALL_BLOCKS, lengths, hidden)
        done = self._done(began_s)
        assert output == expected_output(hidden, lengths)
        return done

    async def backward(self, batches: int = BATCHES) -> Done:
        lengths = [POSITIONS] * batches
        _, crossed = await self.client.outputs(ALL_BLOCKS, lengths, drawn(1, sum(lengths)))
        gradient = drawn(2, sum(lengths))
        began_s = self._begin()
        found = await self.client.gradients(crossed, gradient)
        done = self._done(began_s)
        assert found == expected_gradient(gradient, lengths)
        return done

    def _begin(self) -> float:
        for each in self.times.values():
            each.spent_s = 0.0
        return trio.current_time()

    def _done(self, began_s: float) -> Done:
        return Done(trio.current_time() - began_s, {name: each.spent_s for name, each in self.times.items()})


class Done:
    """A batch took a time, in which each server computed for another."""

    def __init__(self, took_s: float, busy_s: dict[str, float]) -> None:
        self.took_s = took_s
        self.busy_s = busy_s

    @property
    def least_busy(self) -> float:
        """The share of the time in which the server computed that did so least."""
        return min(self.busy_s.values()) / self.took_s


@asynccontextmanager
async def twins(
    monkeypatch: pytest.MonkeyPatch, *times: float, spans: Sequence[Span] = (), policy: ClientPolicy = IMPATIENT
) -> AsyncIterator[Twins]:
    """They have these spans, or all blocks."""
    monkeypatch.setattr(passes, "MOST_POSITIONS", POSITIONS)
    async with world(conditions=Conditions(delay_s=0.001)) as swarm:
        for number, each in enumerate(times):
            span = spans[number] if spans else ALL_BLOCKS
            await swarm.start(f"twin{number}", span, said_us=round(1e6 * POSITION_S * each))
        async with swarm.client(policy) as (router, _):
            found = Twins(swarm, SwarmPasses(router.finder, Codec.RAW), monkeypatch)
            for number, each in enumerate(times):
                found.take(f"twin{number}", each)
            yield found
            nothing_is_left(swarm)


def summed(times: Sequence[float], batches: int = BATCHES) -> float:
    """The time of a forward if all servers computed all the time."""
    return batches * PASS_S / sum(1 / each for each in times)


@pytest.mark.parametrize("times", [(1.0, 2.0), (1.0, 1.5, 4.0)], ids=["two", "three"])
@simulated
async def test_twins_are_busy_each_at_its_speed(times: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, *times) as servers:
        first = await servers.forward()
        assert summed(times) / first.took_s > 0.7, "by what they say, and what they then do"
        later, back = await servers.forward(), await servers.backward()
        assert summed(times) / later.took_s > 0.8
        assert later.least_busy > 0.6
        assert back.least_busy > 0.6
        assert sum(back.busy_s.values()) / back.took_s > 0.8 * len(times)


@simulated
async def test_a_server_of_all_blocks_and_two_of_a_half_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 1.0, 1.0, 1.0, spans=(ALL_BLOCKS, Span(0, 3), Span(3, 6))) as servers:
        await servers.forward()
        assert summed((1.0, 1.0, 1.0)) / (await servers.forward()).took_s > 0.75
        assert (await servers.backward()).least_busy > 0.5


@simulated
async def test_a_slow_twin_gets_nothing_that_it_would_end_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 1.0, 10.0) as servers:
        await servers.forward()
        assert (await servers.forward(4)).busy_s["twin1"] == 0.0
        done = await servers.forward()
        assert done.took_s < 1.05 * BATCHES * PASS_S
        assert done.busy_s["twin1"] < 1.01 * 10 * PASS_S, "one microbatch at most"


@pytest.mark.parametrize("says", [1.0, 0.001], ids=["the same", "much faster"])
@simulated
async def test_a_twin_that_is_not_as_fast_as_it_says_gets_little(says: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 1.0) as servers:
        await servers.start("liar", 10.0, says)
        first = await servers.forward()
        assert first.busy_s["liar"] < 2.01 * 10 * PASS_S
        assert first.took_s < 1.5 * BATCHES * PASS_S
        later = await servers.forward()
        assert later.busy_s["liar"] < 1.01 * 10 * PASS_S
        assert later.took_s < 1.05 * BATCHES * PASS_S


@asynccontextmanager
async def silent(servers: Twins, number: int, says: int = 1) -> AsyncIterator[None]:
    """Servers that say that a block takes `says` microseconds, take passes, and answer none within this context."""
    nodes = [await servers.swarm.start(f"silent{each}", ALL_BLOCKS, said_us=says) for each in range(number)]
    for node in nodes:
        node.worker.gate = trio.Event()
    await trio.sleep(5)
    try:
        yield
    finally:
        for node in nodes:
            node.worker.open_gate()
    await trio.sleep(5)


@pytest.mark.parametrize("strangers", [8, 16])
@simulated
async def test_silent_strangers_get_no_more_than_they_are_tried_with_and_a_proven_server_gets_the_rest(
    strangers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass at a stranger is waited for once, for as long as the policy says."""
    async with twins(monkeypatch, 1.0) as servers:
        await servers.forward()
        async with silent(servers, strangers), trio.open_nursery() as nursery:
            nursery.start_soon(servers.forward, MANY)
            await trio.sleep(1.5 * MANY * PASS_S)
            assert servers.times["twin0"].spent_s > 0.99 * PASS_S * (MANY - AT_FIRST * HOLDERS)
            await trio.sleep(1.5 * LONGEST_PASS_S)
            assert not nursery.child_tasks


@simulated
async def test_silent_strangers_hold_up_the_first_batch_of_a_client_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 1.0) as servers, silent(servers, 16), trio.open_nursery() as nursery:
        nursery.start_soon(servers.forward, MANY)
        await trio.sleep(10 + 1.5 * MANY * PASS_S)
        assert servers.times["twin0"].spent_s > 0.99 * PASS_S * (MANY - AT_FIRST * 16)
        await trio.sleep(1.5 * LONGEST_PASS_S)
        assert not nursery.child_tasks


@simulated
async def test_an_answer_that_is_no_answer_shows_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 1.0) as servers:
        await servers.start("garbage", 0.001, says=0.001)
        answers: list[Frame] = []

        def cut(_peer: PeerId, frame: Frame) -> list[Frame]:
            if frame.type is not FrameType.EVALUATED:
                return [frame]
            answers.append(replace(frame, payload=frame.payload[:-4]))
            return answers[-1:]

        servers.swarm.nodes["garbage"].network.tamper = cut
        await servers.forward()
        loads, now_s = servers.client._turns.routes.loads, trio.current_time()
        assert answers
        assert loads.kind(peer_named("twin0"), now_s) is Kind.MEASURED
        assert loads.kind(peer_named("garbage"), now_s) is Kind.UNTRIED


@simulated
async def test_a_server_whose_answer_is_being_checked_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ClientPolicy(spot_checks=SpotCheckPolicy(share=1.0))
    async with (
        twins(monkeypatch, 1.0, policy=checks) as servers,
        silent(servers, 1, says=10**6),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(servers.forward, 1)
        await trio.sleep(5 * PASS_S)
        assert nursery.child_tasks, "the check waits for its second server"
        loads = servers.client._turns.routes.loads
        weight = pass_weight(POSITIONS, is_backward=False)
        holder = Holder(peer_named("twin0"), ALL_BLOCKS, HopCost(0.0, POSITION_S), HopCost(0.0, POSITION_S))
        assert loads.kind(holder.peer, trio.current_time()) is Kind.MEASURED
        assert loads.costs([holder], weight, trio.current_time())[holder.peer].hop_s == 0.0


@simulated
async def test_a_newcomer_that_is_faster_gets_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 4.0) as servers:
        await servers.forward()
        await servers.start("fast", 1.0, says=1.0)
        await servers.forward()
        assert summed((1.0, 4.0)) / (await servers.forward()).took_s > 0.8


@simulated
async def test_microbatches_leave_a_twin_that_gets_slow_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch, 1.0, 1.0) as servers:
        await servers.forward()
        servers.times["twin0"].position_s *= 8
        done = await servers.forward()
        assert done.took_s < 4.5 * 8 * PASS_S, "those that it had, and none that waited for it"
        assert done.busy_s["twin1"] > 8 * PASS_S


@simulated
async def test_all_servers_are_looked_through_once_for_many_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = PeerRecords.costs_and_doubts

    def count(records: PeerRecords, announcements: Sequence[object], *more: object, **options: object) -> object:
        looks.append(len(announcements))
        return look(records, announcements, *more, **options)  # type: ignore[arg-type]  # as it is

    async with twins(monkeypatch, 0.05, 0.1) as servers:
        await there_and_back(servers.client, 1, [POSITIONS] * BATCHES)
        await trio.sleep(5)
        monkeypatch.setattr(PeerRecords, "costs_and_doubts", count)
        await there_and_back(servers.client, 1, [POSITIONS] * BATCHES)
        assert 0 < len(looks) <= 2, "for passes, and for those that would take over"


@simulated
async def test_the_best_servers_of_a_block_may_all_be_unfit_for_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are looked for once, and not for each microbatch."""
    async with twins(monkeypatch, *[0.1] * HOLDERS, 1.0) as servers:
        routes, weight = servers.client._turns.routes, pass_weight(POSITIONS, is_backward=False)
        unfit = {peer_named(f"twin{number}") for number in range(HOLDERS)}
        finds: list[Span] = []
        find = routes.finder.find
        monkeypatch.setattr(
            routes.finder, "find", lambda span, *more, **by: finds.append(span) or find(span, *more, **by)
        )
        for _ in range(5):
            route, _, load = await routes.find(ALL_BLOCKS, unfit, weight)
            assert [hop.peer for hop in route] == [peer_named(f"twin{HOLDERS}")]
            routes.loads.take_back(load)
        assert not finds
