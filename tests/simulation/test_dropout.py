"""Dropout of adapters in blocks: the same through any cut, lost servers and spot checks, and never left out."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import PeerId
from llmnode.core.policy import ClientPolicy, SpotCheckPolicy
from llmnode.errors import NoRoute, SessionLost
from llmnode.session.passes import SwarmPasses
from llmnode.testing.exact_blocks import exact_input
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import EXTENSIONS, RefusalCode, unpack
from llmnode.wire.pass_messages import ALONE, DROPOUT, Pass
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.adapters import drawn_adapter, drawn_dropout, there_and_back
from simulation.world import ALL_BLOCKS, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.wire.frame import Frame

SEEDS = [2, 3, 6, 7]
"""Those with which `there_and_back` has dropout."""
LENGTHS = [1 + number % 3 for number in range(40)]
"""More than one pass has."""


@simulated
async def test_a_backward_has_the_dropout_of_its_forward_though_all_of_its_servers_die_between_them() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):

        def die() -> None:
            used = [name for name, node in swarm.nodes.items() if node.worker.executor.forwards]
            assert len({name[0] for name in used}) == 3
            for index in range(3):
                swarm.kill(next(name for name in used if name.startswith(str(index))))

        adapter = drawn_adapter(random.Random(1))
        await there_and_back(SwarmPasses(router.finder, Codec.RAW), SEEDS[0], LENGTHS, adapter, between=die)


@simulated
async def test_a_spot_check_computes_the_same_dropout() -> None:
    policy = ClientPolicy(spot_checks=SpotCheckPolicy(1.0))
    async with pairs_of_servers() as swarm, swarm.client(policy) as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        for seed in SEEDS:
            await there_and_back(client, seed, LENGTHS, drawn_adapter(random.Random(seed)))
        assert client.checks.passed >= 2 * 3 * len(SEEDS)
        assert not client.checks.found and not client.checks.undecided


def _requires(frame: Frame) -> Iterable[str]:
    is_pass = frame.type in {FrameType.EVALUATE, FrameType.BACKWARD}
    return (unpack(Pass, frame.meta).required or ()) if is_pass else ()


@simulated
async def test_a_server_of_before_dropout_is_asked_once_and_computes_the_rest() -> None:
    asked: list[PeerId] = []

    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        old = {swarm.nodes[f"{index}a"].peer for index in range(3)}

        def note(peer: PeerId, frame: Frame) -> list[Frame]:
            if DROPOUT in _requires(frame) and peer in old:
                asked.append(peer)
            return [frame]

        def of_before(_peer: PeerId, frame: Frame) -> list[Frame]:
            is_answer = frame.type in {FrameType.EVALUATED, FrameType.GRADIENT}
            return [refusal_of(frame, RefusalCode.UNKNOWN_EXTENSION, DROPOUT)] if is_answer else [frame]

        router.finder.pool.network.tamper = note  # type: ignore[attr-defined]
        for index in range(3):
            swarm.nodes[f"{index}a"].network.tamper = of_before
        client, adapter = SwarmPasses(router.finder, Codec.RAW), drawn_adapter(random.Random(3))
        for seed in SEEDS:
            await there_and_back(client, seed, [3, 1], adapter)
        assert asked and len(asked) == len(set(asked))
        for index in range(3):
            swarm.nodes[f"{index}a"].network.tamper = None
        before = sum(swarm.nodes[f"{index}a"].worker.executor.forwards for index in range(3))
        for seed in (4, 5, 8, 9):
            await there_and_back(client, seed, LENGTHS, adapter)
        assert sum(swarm.nodes[f"{index}a"].worker.executor.forwards for index in range(3)) > before


@simulated
async def test_no_adapter_goes_ahead_to_a_server_that_knows_no_dropout() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client, brought, rng = SwarmPasses(router.finder, Codec.RAW), list[PeerId](), random.Random(3)
        for _ in range(4):
            await client.outputs(ALL_BLOCKS, LENGTHS, exact_input(rng, sum(LENGTHS)))
        old = {swarm.nodes[f"{index}a"].peer for index in range(3)}
        for connection in router.finder.pool.living():
            connection.knows_dropout = connection.peer not in old

        def note(peer: PeerId, frame: Frame) -> list[Frame]:
            if frame.type is FrameType.ADAPTER:
                brought.append(peer)
            return [frame]

        router.finder.pool.network.tamper = note  # type: ignore[attr-defined]
        for _ in range(4):
            given = [3, 1], exact_input(rng, 4), drawn_adapter(rng)
            await client.outputs(ALL_BLOCKS, *given, dropout=drawn_dropout(rng, 2))
        assert brought
        assert not old & {*brought}


TOO_OLD = r"too old for adapters and lora_dropout .* with lora_dropout=0"


@simulated
async def test_with_servers_of_before_dropout_alone_the_client_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTENSIONS, Pass, EXTENSIONS[Pass] - {DROPOUT})
    async with pairs_of_servers() as swarm:
        async with swarm.client() as (router, _):
            client, rng = SwarmPasses(router.finder, Codec.RAW), random.Random(4)
            given = [1], exact_input(rng, 1), drawn_adapter(rng)
            for _ in range(2):
                began_s = trio.current_time()
                with pytest.raises(NoRoute, match=TOO_OLD):
                    await client.outputs(ALL_BLOCKS, *given, dropout=drawn_dropout(rng, 1))
                assert trio.current_time() < began_s + 1
            await client.outputs(ALL_BLOCKS, *given)
            began_s = trio.current_time()
            with pytest.raises(NoRoute, match=TOO_OLD):
                await client.outputs(ALL_BLOCKS, *given, dropout=drawn_dropout(rng, 1))
            assert trio.current_time() < began_s + 1
            monkeypatch.setitem(EXTENSIONS, Pass, EXTENSIONS[Pass] - {ALONE})
            with pytest.raises(SessionLost, match="'alone', which is required"):
                await client.outputs(ALL_BLOCKS, *given[:2], deterministic=True)
            assert trio.current_time() < began_s + 2
        assert any(node.worker.executor.forwards for node in swarm.nodes.values())


@simulated
async def test_beside_servers_of_before_dropout_a_client_waits_for_one_that_has_computed_and_is_gone() -> None:
    def of_before(_peer: PeerId, frame: Frame) -> list[Frame]:
        is_answer = frame.type in {FrameType.EVALUATED, FrameType.GRADIENT}
        return [refusal_of(frame, RefusalCode.UNKNOWN_EXTENSION, DROPOUT)] if is_answer else [frame]

    async with world() as swarm:
        (await swarm.start("old", ALL_BLOCKS)).network.tamper = of_before
        await swarm.start("new", ALL_BLOCKS)
        await trio.sleep(10)  # both are known
        async with swarm.client() as (router, _):
            client, rng = SwarmPasses(router.finder, Codec.RAW), random.Random(4)
            given = [1], exact_input(rng, 1), drawn_adapter(rng)
            dropout = drawn_dropout(rng, 1)
            output, _ = await client.outputs(ALL_BLOCKS, *given, dropout=dropout)
            for connection in router.finder.pool.living():
                connection.knows_dropout = connection.peer != swarm.nodes["old"].peer
            await swarm.stop("new")

            async def restart() -> None:
                await trio.sleep(12)
                await swarm.start("new", ALL_BLOCKS)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(restart)
                assert (await client.outputs(ALL_BLOCKS, *given, dropout=dropout))[0] == output
