"""The limits of passes: their time, the peers that are asked for them, and the end of those that nobody waits for."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, PassPolicy, RecoveryPolicy, ServePolicy
from llmnode.errors import NoRoute, PeerRefused, PeerTimeout, SessionLost
from llmnode.session.passes import SwarmPasses
from llmnode.testing import exact_output, open_world
from llmnode.testing.exact_blocks import exact_input
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode, pack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields
from llmnode.wire.refusal import refusal_of
from simulation.world import ALL_BLOCKS, MODEL, ROW, SPANS, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.testing import World
    from llmnode.testing.world import ServingNode, SimulatedClient

HIDDEN = exact_input(random.Random(1), 8)
OUTPUT = exact_output(HIDDEN, ALL_BLOCKS)
PART_S = 5.0
"""A slow server takes this long for each part, which is one block. A pass has six."""


async def slow_server(swarm: World, name: str = "slow", part_s: float = PART_S) -> ServingNode:
    node = await swarm.start(name, ALL_BLOCKS)
    node.worker.slower_by_s = part_s
    return node


async def there(client: SimulatedClient) -> None:
    output, _ = await SwarmPasses(client.router.finder, Codec.RAW).outputs(ALL_BLOCKS, [8], HIDDEN)
    assert output == OUTPUT


async def connected(client: SimulatedClient) -> PeerConnection:
    _, connections = await client.router.finder.find(ALL_BLOCKS, 0, (), hurry=False)
    (connection,) = connections.values()
    return connection


async def ask(connection: PeerConnection, timeout_s: float, extensions: dict[str, object] | None) -> Frame:
    meta = pack(
        Pass(
            **profile_fields(MODEL.profile),
            span_start=0,
            span_end=6,
            codec="raw",
            priority="training",
            lengths=[8],
            extensions=extensions,
        )
    )
    return await connection.ask_pass(FrameType.EVALUATE, FrameType.EVALUATED, timeout_s, meta, HIDDEN, 4)


async def check_idle(node: ServingNode) -> None:
    """It ends the part that it computes, and no other."""
    assert node.server.passes == 1
    await trio.sleep(PART_S)
    assert node.server.passes == 0
    forwards = node.worker.executor.forwards
    await trio.sleep(10 * PART_S)
    assert node.worker.executor.forwards == forwards < 6


@simulated
async def test_a_server_stops_a_pass_that_its_client_has_cancelled() -> None:
    async with world() as swarm:
        node = await slow_server(swarm)
        async with swarm.client() as client:
            with trio.move_on_after(1.5 * PART_S):
                await there(client)
            await trio.sleep(1)
            await check_idle(node)
            node.worker.slower_by_s = 0.0
            await there(client)


@simulated
async def test_a_server_stops_a_pass_that_its_client_has_given_up() -> None:
    async with world() as swarm:
        node = await slow_server(swarm)
        async with swarm.client() as client:
            with pytest.raises(PeerTimeout):
                await ask(await connected(client), 1.5 * PART_S, None)
            await trio.sleep(1)
            await check_idle(node)


@simulated
async def test_a_pass_that_is_taken_back_does_not_end_another_one() -> None:
    async with world() as swarm:
        await slow_server(swarm)
        async with swarm.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(there, client)
            await trio.sleep(1)
            with pytest.raises(PeerTimeout):
                await ask(await connected(client), 1.0, None)


@simulated
async def test_a_server_stops_a_pass_when_its_client_waits_no_more() -> None:
    """The client is cut off, and its link lives on."""
    async with world() as swarm:
        node = await slow_server(swarm)
        async with swarm.client() as client:
            with pytest.raises(PeerRefused, match="the time for this pass is over") as refused:
                await ask(await connected(client), 100.0, {"deadline_ms": int(1500 * PART_S)})
            assert refused.value.code == RefusalCode.BUSY
            await trio.sleep(1)
            assert node.server.passes == 0
            assert node.worker.executor.forwards == 2


@simulated
async def test_a_server_has_a_limit_of_its_own_for_passes() -> None:
    policy = ServePolicy(longest_pass_s=1.5 * PART_S)
    async with open_world(serve_policy=policy) as swarm:
        await slow_server(swarm)
        async with swarm.client() as client:
            for extensions in (None, {"deadline_ms": 100_000}):
                with pytest.raises(PeerRefused, match="the time for this pass is over"):
                    await ask(await connected(client), 100.0, extensions)


@simulated
async def test_a_deadline_that_is_none_is_refused() -> None:
    async with world() as swarm:
        await slow_server(swarm, part_s=0.0)
        async with swarm.client() as client:
            with pytest.raises(PeerRefused) as refused:
                await ask(await connected(client), 100.0, {"deadline_ms": "soon"})
            assert refused.value.code == RefusalCode.BAD_MESSAGE
            await ask(await connected(client), 100.0, {"deadline_ms": 5000, "another": 1})


@simulated
async def test_a_pass_that_is_large_for_its_servers_has_more_time() -> None:
    policy = ClientPolicy(passes=PassPolicy(cost_per_s=0.5))
    async with world() as swarm:
        await slow_server(swarm, part_s=20.0)
        async with swarm.client(policy) as client:
            began_s = trio.current_time()
            await there(client)
            assert trio.current_time() - began_s > policy.step_timeout_s
            assert not client.router.finder.failures  # type: ignore[attr-defined]


@simulated
async def test_a_server_that_hangs_is_given_up_by_what_passes_took_before() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as client:
        passes = SwarmPasses(client.router.finder, Codec.RAW)
        for _ in range(12):  # by then each server has done some
            await passes.outputs(ALL_BLOCKS, [8], HIDDEN)
        for index in range(3):
            assert all(swarm.nodes[f"{index}{twin}"].worker.executor.forwards for twin in "ab")
            swarm.nodes[f"{index}a"].worker.gate = trio.Event()
        began_s = trio.current_time()
        await passes.outputs(ALL_BLOCKS, [8], HIDDEN)
        assert trio.current_time() - began_s < 3 * (PassPolicy().patience_s + 5)
        for index in range(3):
            swarm.nodes[f"{index}a"].worker.open_gate()


@simulated
async def test_servers_that_hang_one_after_the_other_do_not_end_a_pass_while_there_is_another() -> None:
    async with world() as swarm:
        for number in range(3):
            await swarm.start(f"hangs{number}", ALL_BLOCKS, said_us=1)
            swarm.nodes[f"hangs{number}"].worker.gate = trio.Event()
        await swarm.start("works", ALL_BLOCKS, said_us=100_000)
        async with swarm.client() as client:
            await there(client)
        for number in range(3):
            swarm.nodes[f"hangs{number}"].worker.open_gate()


@simulated
async def test_a_server_without_memory_for_a_pass_is_asked_once_and_others_when_they_come() -> None:
    asked = []

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        if frame.type is not FrameType.EVALUATED:
            return [frame]
        asked.append(frame)
        return [refusal_of(frame, RefusalCode.NO_ROOM, "more than there is for one")]

    async with world() as swarm:
        (await swarm.start("small", ALL_BLOCKS)).network.tamper = refuse
        async with swarm.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(there, client)
            await trio.sleep(10)
            await swarm.start("large", ALL_BLOCKS)
        assert len(asked) == 1


@simulated
async def test_if_no_server_has_memory_for_a_pass_its_client_is_told_so() -> None:
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=5.0))
    async with open_world(serve_policy=ServePolicy(pass_positions=4)) as swarm:
        for number, span in enumerate(SPANS):
            await swarm.start(str(number), span)
        async with swarm.client(policy) as client:
            with pytest.raises((NoRoute, SessionLost), match="at most 4 positions"):
                await there(client)


@simulated
async def test_a_draining_server_waits_for_passes() -> None:
    async with world() as swarm:
        node = await slow_server(swarm)
        async with swarm.client() as client, trio.open_nursery() as nursery:
            nursery.start_soon(there, client)
            await trio.sleep(PART_S)
            nursery.start_soon(partial(swarm.drain, "slow", 1000))
            await trio.sleep(4 * PART_S)
            assert "slow" in swarm.nodes
            await trio.sleep(2 * PART_S)
            assert "slow" not in swarm.nodes
            assert not client.router.finder.failures  # type: ignore[attr-defined]
        assert node.worker.executor.forwards == 6
        assert len(HIDDEN) == 8 * ROW


@simulated
async def test_a_server_that_is_busy_for_days_by_its_word_is_waited_for_no_longer_than_others() -> None:
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=10.0))

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        if frame.type is not FrameType.EVALUATED:
            return [frame]
        return [refusal_of(frame, RefusalCode.BUSY, "come back in a month", 1e6)]

    async with world() as swarm:
        (await swarm.start("busy", ALL_BLOCKS)).network.tamper = refuse
        await trio.sleep(5)
        async with swarm.client(policy) as client:
            began_s = trio.current_time()
            with pytest.raises(SessionLost, match="come back in a month"):
                await there(client)
            assert trio.current_time() - began_s < 2 * policy.recovery.timeout_s
