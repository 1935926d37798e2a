"""A client with a slow uplink and many passes at once blames no server for its own slowness."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, PassPolicy
from llmnode.session import passes
from llmnode.session.passes import SwarmPasses
from llmnode.swarm import brought_adapters
from llmnode.testing.network import peer_named
from llmnode.wire.adapter import make_adapter
from llmnode.wire.payload import Codec
from simulation.passes import drawn, expected_gradient, expected_output
from simulation.world import ALL_BLOCKS, MODEL, ROW, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.ids import PeerId
    from llmnode.testing import World

POSITIONS, LENGTH = 1024, 128
PASS_BYTES = POSITIONS * ROW
SCALE = 1 / 16
"""All is this much faster than in practice: a simulated swarm has much to do in an hour."""
ALONE_S = 32 * SCALE
"""A pass takes this long over the uplink if no other one is there: 4 MiB at 1 Mbit/s."""
UPLINK = PASS_BYTES / ALONE_S
USUAL = PassPolicy()
POLICY = replace(
    USUAL,
    base_s=SCALE * USUAL.base_s,
    bytes_per_s=UPLINK / 2,
    longest_s=SCALE * USUAL.longest_s,
    patience_s=SCALE * USUAL.patience_s,
    first_patience_s=SCALE * USUAL.first_patience_s,
    first_patience_times=1.5,
)
"""An uplink of 1 Mbit/s is twice what a pass is given at least, in practice too."""


@asynccontextmanager
async def slow_client(monkeypatch: pytest.MonkeyPatch, servers: int) -> AsyncIterator[tuple[World, SwarmPasses]]:
    """Servers of all blocks, which answer at once, and a client that knows none of them."""
    monkeypatch.setattr(passes, "MOST_POSITIONS", POSITIONS)
    async with world() as swarm:
        for number in range(servers):
            await swarm.start(f"server{number}", ALL_BLOCKS)
        swarm.internet.set_uplink(peer_named("client"), UPLINK)
        async with swarm.client(ClientPolicy(passes=POLICY)) as (router, _):
            yield swarm, SwarmPasses(router.finder, Codec.RAW)


async def there_and_back(client: SwarmPasses, passes_: int = 16) -> float:
    """A forward and a backward of this number of passes. Returns the time of the forward."""
    lengths = [LENGTH] * (passes_ * POSITIONS // LENGTH)
    hidden, gradient = drawn(1, sum(lengths)), drawn(2, sum(lengths))
    began_s = trio.current_time()
    output, crossed = await client.outputs(ALL_BLOCKS, lengths, hidden)
    took_s = trio.current_time() - began_s
    assert output == expected_output(hidden, lengths)
    assert await client.gradients(crossed, gradient) == expected_gradient(gradient, lengths)
    return took_s


def blamed(client: SwarmPasses) -> set[PeerId]:
    """The servers that were reported, or left for others."""
    finder, now_s = client._finder, trio.current_time()
    resting, banned = client._patience.resting(now_s), finder.records.bans.banned(now_s)
    return {*(peer for _, peer in finder.failures), *banned, *resting}  # type: ignore[attr-defined]


@pytest.mark.parametrize("servers", [1, 4, 12])
@simulated
async def test_servers_are_not_blamed_for_the_uplink_of_a_client(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is new has several passes at each of them, and all of these take longer than one may take."""
    async with slow_client(monkeypatch, servers) as (_, client):
        for _ in range(2):
            took_s = await there_and_back(client)
            assert 16 * ALONE_S < took_s < 20 * ALONE_S, "the uplink has no pause"
            assert not blamed(client)


@simulated
async def test_a_newcomer_is_not_left_for_the_uplink_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held to what others take, from when something is sent to it."""
    async with slow_client(monkeypatch, 3) as (swarm, client):
        await there_and_back(client)
        for number in range(6):
            await swarm.start(f"newcomer{number}", ALL_BLOCKS)
        await trio.sleep(5)
        await there_and_back(client, 32)
        assert all(client._patience.is_known(node.peer) for node in swarm.nodes.values())
        assert not blamed(client)


@simulated
async def test_a_server_that_is_silent_is_left_beside_a_slow_uplink(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_client(monkeypatch, 2) as (swarm, client):
        await there_and_back(client)
        (await swarm.start("silent", ALL_BLOCKS, said_us=1)).worker.gate = trio.Event()
        await trio.sleep(5)
        await there_and_back(client)
        assert blamed(client) == {peer_named("silent")}
        swarm.nodes["silent"].worker.open_gate()


@simulated
async def test_servers_are_not_blamed_for_the_uplink_while_an_adapter_is_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adapter takes longer than passes may, and goes to several servers at a time."""
    values = PASS_BYTES // 4
    adapter = make_adapter(MODEL.digest, {block: (bytes(4 * values), values) for block in range(MODEL.blocks)})
    monkeypatch.setattr(brought_adapters, "BYTES_PER_S", UPLINK / 2)
    async with slow_client(monkeypatch, 6) as (_, client):
        lengths = [LENGTH] * (16 * POSITIONS // LENGTH)
        await client.outputs(ALL_BLOCKS, lengths, drawn(1, sum(lengths)), adapter)
        assert not blamed(client)
