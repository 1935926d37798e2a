"""The sessions of a large batch open in a moment where they keep nobody else from computing."""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import ServePolicy
from llmnode.core.span import Span
from llmnode.swarm.membership import Swarm
from llmnode.testing import Conditions, Dialogue, open_world, simulated
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from llmnode.core.ids import PeerId
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.testing.world import SimulatedClient

ROWS, POSITIONS = 48, 4
WAY_S = 0.01


async def open_batch(client: SimulatedClient) -> float:
    """The time until the sessions of a batch are open. Each then has a step, and ends."""
    opened, began_s = trio.Event(), trio.current_time()
    left = ROWS

    async def run() -> None:
        nonlocal left
        async with client.router.open_session(POSITIONS, Codec.RAW) as session:
            left -= 1
            if not left:
                opened.set()
            await opened.wait()
            await Dialogue(session, Random(0)).step(1)

    async with trio.open_nursery() as nursery:
        for _ in range(ROWS):
            nursery.start_soon(run)
        await opened.wait()
        took_s = trio.current_time() - began_s
    return took_s


@simulated
async def test_batches_of_a_client_open_in_a_moment_one_after_the_other() -> None:
    async with open_world(conditions=Conditions(delay_s=WAY_S)) as world, AsyncExitStack() as stack:
        for name, span in {"0a": Span(0, 3), "1a": Span(3, 6)}.items():
            await world.start(name, span)
        client = await stack.enter_async_context(world.client())
        assert max([await open_batch(client) for _ in range(4)]) < 0.5


@simulated
async def test_the_sessions_of_a_batch_tell_a_server_once_about_its_next_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PeerConnection] = []
    introduce = Swarm.introduce

    async def count(swarm: Swarm, connection: PeerConnection, peers: Iterable[PeerId]) -> None:
        peers = list(peers)
        told.extend([connection] * len(peers))
        await introduce(swarm, connection, peers)

    async with open_world() as world:
        for name, span in {"0a": Span(0, 3), "1a": Span(3, 6)}.items():
            await world.start(name, span)
        async with world.client() as client:
            await open_batch(client)
            await trio.sleep(1)
            monkeypatch.setattr(Swarm, "introduce", count)
            await open_batch(client)
            assert not told
            await trio.sleep(client.router.finder.policy.route.introduced_s)
            await open_batch(client)
            assert told


@simulated
async def test_beside_steps_of_others_a_batch_takes_its_turns() -> None:
    """It has its burst at once, and then the shared rate."""
    async with open_world() as world:
        await world.start("0a", Span(0, 6))
        async with (
            world.client() as client,
            world.client(name="other") as other,
            other.router.open_session(64, Codec.RAW) as session,
            trio.open_nursery() as nursery,
        ):

            async def decode() -> None:
                dialogue = Dialogue(session, Random(0))
                while True:
                    await dialogue.step(1)
                    await dialogue.go_back(1)

            nursery.start_soon(decode)
            await trio.sleep(1)
            requests = ServePolicy().requests
            least_s = (4 * ROWS - requests.burst) / requests.shared_per_s
            assert await open_batch(client) >= 0.9 * least_s
            nursery.cancel_scope.cancel()
