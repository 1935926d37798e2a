"""A silent server that a client does not know holds up a pass for seconds, if others have its blocks and are known.

A slow one that is honest is not lost by that.
"""

from __future__ import annotations

import math
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.peers.pass_loads import Kind
from llmnode.core.policy import ClientPolicy, PassPolicy
from llmnode.node.serve.adapter_store import AdapterStore
from llmnode.session import passes
from llmnode.session.passes import SwarmPasses
from llmnode.testing import Conditions
from llmnode.testing.network import peer_named
from llmnode.wire.adapter import make_adapter
from llmnode.wire.frame import FrameType
from llmnode.wire.payload import Codec
from simulation.adapters import drawn_adapter
from simulation.adapters import there_and_back as with_adapter
from simulation.passes import drawn, expected_output, take_time, there_and_back
from simulation.world import ALL_BLOCKS, MODEL, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.ids import PeerId
    from llmnode.testing import World
    from llmnode.wire.frame import Frame

POSITIONS = 32
PASS_S = 0.1
POSITION_S = PASS_S / POSITIONS / len(ALL_BLOCKS)
LARGE = PassPolicy(cost_per_s=0.5)
"""Any pass here may take 444 s, and a backward much longer: it is large for the servers."""
BY_SIZE_S = LARGE.base_s + POSITIONS * len(ALL_BLOCKS) / LARGE.cost_per_s
FIRST_S = LARGE.first_patience_s + LARGE.first_patience_times * 4 * PASS_S
"""A known server had four passes together before."""
NOT_HELD = replace(LARGE, first_patience_s=math.inf)
"""Strangers have the time for the size of a pass, as they had before."""


@asynccontextmanager
async def client_and_server(
    monkeypatch: pytest.MonkeyPatch, policy: PassPolicy = LARGE, bytes_per_s: float = math.inf
) -> AsyncIterator[tuple[World, SwarmPasses]]:
    """An honest server of all blocks, which the client does not know yet."""
    monkeypatch.setattr(passes, "MOST_POSITIONS", POSITIONS)
    async with world(conditions=Conditions(delay_s=0.001, bytes_per_s=bytes_per_s)) as swarm:
        node = await swarm.start("works", ALL_BLOCKS, said_us=round(1e6 * POSITION_S))
        take_time(node.worker, POSITION_S, monkeypatch)
        async with swarm.client(ClientPolicy(passes=policy)) as (router, _):
            yield swarm, SwarmPasses(router.finder, Codec.RAW)


async def forward(client: SwarmPasses, batches: int = 4) -> float:
    """Returns the time that it took."""
    lengths, began_s = [POSITIONS] * batches, trio.current_time()
    hidden = drawn(1, sum(lengths))
    output, _ = await client.outputs(ALL_BLOCKS, lengths, hidden)
    assert output == expected_output(hidden, lengths)
    return trio.current_time() - began_s


@asynccontextmanager
async def silent(swarm: World, *names: str) -> AsyncIterator[None]:
    """Servers that say that they are fast, take passes, and answer none within this context."""
    for name in names:
        (await swarm.start(name, ALL_BLOCKS, said_us=1)).worker.gate = trio.Event()
    await trio.sleep(5)
    try:
        yield
    finally:
        for name in names:
            swarm.nodes[name].worker.open_gate()


def kind(client: SwarmPasses, name: str) -> Kind:
    return client._turns.routes.loads.kind(peer_named(name), trio.current_time())


def bans(client: SwarmPasses) -> set[PeerId]:
    return client._finder.records.bans.banned(trio.current_time())


@pytest.mark.parametrize("is_first", [True, False], ids=["first batch of the client", "later"])
@simulated
async def test_a_silent_stranger_beside_a_known_server_costs_seconds(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the size of a pass it would be waited for much longer: this is the gain."""
    took_s = {}
    for policy in (LARGE, NOT_HELD):
        async with client_and_server(monkeypatch, policy) as (swarm, client):
            if not is_first:
                await forward(client)
            async with silent(swarm, "silent"):
                took_s[policy] = await forward(client)
                assert not bans(client)
                assert await forward(client) < 5 * PASS_S, "it rests"
    assert took_s[NOT_HELD] > BY_SIZE_S > 440
    assert took_s[LARGE] < FIRST_S + 1 < 13


@simulated
async def test_a_backward_does_not_wait_for_a_silent_stranger_either(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_and_server(monkeypatch) as (swarm, client):
        await forward(client)
        lengths = [POSITIONS] * 4
        _, crossed = await client.outputs(ALL_BLOCKS, lengths, drawn(1, sum(lengths)))
        async with silent(swarm, "silent"):
            began_s = trio.current_time()
            await client.gradients(crossed, drawn(2, sum(lengths)))
            assert LARGE.first_patience_s < trio.current_time() - began_s < LARGE.first_patience_s + 10


@simulated
async def test_many_silent_strangers_hold_up_a_pass_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that one of them held up goes to a server that is known."""
    async with client_and_server(monkeypatch) as (swarm, client):
        await forward(client)
        async with silent(swarm, *[f"silent{number}" for number in range(12)]):
            assert await forward(client, 32) < FIRST_S + 32 * PASS_S + 1


@simulated
async def test_a_newcomer_that_is_slow_and_honest_is_not_banned_and_is_known_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes longer than it is given at first, though it says that it is fast."""
    async with client_and_server(monkeypatch) as (swarm, client):
        await forward(client)
        node = await swarm.start("slow", ALL_BLOCKS, said_us=1)
        take_time(node.worker, 1.5 * FIRST_S / 2 / POSITIONS / len(ALL_BLOCKS), monkeypatch)  # it has two together
        await trio.sleep(5)
        assert await forward(client) < FIRST_S + 1
        assert kind(client, "slow") is Kind.UNTRIED
        assert not bans(client), "sessions may use it"
        await trio.sleep(LARGE.rest_times * FIRST_S)
        await forward(client)
        assert kind(client, "slow") is Kind.MEASURED


@simulated
async def test_a_newcomer_is_waited_for_if_those_that_are_known_leave_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_and_server(monkeypatch) as (swarm, client):
        await forward(client)
        node = await swarm.start("slow", ALL_BLOCKS, said_us=1)
        take_time(node.worker, 10 * FIRST_S / POSITIONS / len(ALL_BLOCKS), monkeypatch)
        await trio.sleep(5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forward, client, 1)
            await trio.sleep(1)
            await swarm.drain("works", 1)
        assert kind(client, "slow") is Kind.MEASURED
        assert not bans(client)


@simulated
async def test_a_resting_server_is_asked_if_nobody_else_has_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_and_server(monkeypatch) as (swarm, client):
        await forward(client)
        async with silent(swarm, "sleeps"):
            assert await forward(client) > LARGE.first_patience_s
        await swarm.drain("works", 1)
        assert await forward(client) < 10


@simulated
async def test_a_stranger_that_never_answers_about_an_adapter_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_and_server(monkeypatch) as (swarm, client):
        adapter, lengths = drawn_adapter(random.Random(1)), [POSITIONS] * 4
        await with_adapter(client, 0, lengths, adapter)
        await swarm.start("silent", ALL_BLOCKS, said_us=1)
        withheld: list[Frame] = []

        def withhold(_peer: PeerId, frame: Frame) -> list[Frame]:
            if frame.type is not FrameType.LACKING:
                return [frame]
            withheld.append(frame)
            return []

        swarm.nodes["silent"].network.tamper = withhold
        await trio.sleep(5)
        began_s = trio.current_time()
        await with_adapter(client, 0, lengths, adapter)
        assert withheld
        assert LARGE.first_patience_s < trio.current_time() - began_s < 2 * FIRST_S
        assert not bans(client)
        await there_and_back(client, 0, lengths)


@simulated
async def test_a_newcomer_has_its_time_from_the_last_part_of_an_adapter_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts take longer than the pass may."""
    values, lengths = 12_000, [POSITIONS]
    adapter = make_adapter(MODEL.digest, {block: (bytes(4 * values), values) for block in range(MODEL.blocks)})
    async with client_and_server(monkeypatch, bytes_per_s=10_000) as (swarm, client):
        await client.outputs(ALL_BLOCKS, lengths, drawn(1, POSITIONS), adapter)
        node = await swarm.start("newcomer", ALL_BLOCKS, said_us=1)
        take_time(node.worker, POSITION_S, monkeypatch)
        await trio.sleep(5)
        began_s = trio.current_time()
        await client.outputs(ALL_BLOCKS, lengths, drawn(1, POSITIONS), adapter)
        assert trio.current_time() - began_s > 25
        assert kind(client, "newcomer") is Kind.MEASURED


@pytest.mark.parametrize("others_took", [True, False])
@simulated
async def test_a_stranger_that_takes_each_part_of_an_adapter_just_in_time_costs_seconds(
    others_took: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have its time anew from each part on."""
    values, lengths = 12_000, [POSITIONS]
    adapter = make_adapter(MODEL.digest, {block: (bytes(4 * values), values) for block in range(MODEL.blocks)})
    bring, one_by_one = AdapterStore.bring, trio.Lock()

    async def trickle(*part: Any) -> None:
        async with one_by_one:
            await trio.sleep(0.8 * LARGE.first_patience_s)
            await bring(*part)

    async with client_and_server(monkeypatch) as (swarm, client):
        await client.outputs(ALL_BLOCKS, lengths, drawn(1, POSITIONS), adapter)
        if not others_took:
            client._patience._parts.clear()
        (await swarm.start("stranger", ALL_BLOCKS, said_us=1)).worker.gate = trio.Event()
        await trio.sleep(5)
        monkeypatch.setattr(AdapterStore, "bring", trickle)
        began_s = trio.current_time()
        await client.outputs(ALL_BLOCKS, lengths, drawn(1, POSITIONS), adapter)
        took_s, size_bytes = trio.current_time() - began_s, sum(map(len, adapter.parts.values()))
        swarm.nodes["stranger"].worker.open_gate()
        assert took_s < 2 * FIRST_S + (0 if others_took else size_bytes / LARGE.bytes_per_s) + 1
        assert kind(client, "stranger") is Kind.UNTRIED
        assert not bans(client)
