"""Adapters that a server refuses: bad ones, malformed frames about them, and more than it has memory for."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import trio

from llmnode.core.model import FP32_BYTES as FP32
from llmnode.core.policy import BudgetPolicy, ClientPolicy, LinkPolicy, RecoveryPolicy
from llmnode.core.serving.adapter_shelf import ENTRY_BYTES
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerRefused, PeerUnreachable, SessionLost
from llmnode.session.passes import SwarmPasses
from llmnode.testing import exact_output, open_world
from llmnode.testing.exact_blocks import exact_input
from llmnode.testing.world import GENEROUS
from llmnode.wire.adapter import Manifest, PartName, make_adapter
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import pack
from llmnode.wire.payload import Codec
from simulation.adapters import BRIEF, connection_to, drawn_adapter, nothing_is_left, there_and_back
from simulation.world import ALL_BLOCKS, MODEL, SPANS, simulated, world

LENGTHS = [5, 1, 30, 2, 12]
MANY = 1 << 20


@pytest.mark.parametrize(
    ("code", "parts", "changes"),
    [
        ("wrong-model", {0: (bytes(8), 2)}, {"model_digest": bytes(32)}),
        ("bad-adapter", {MODEL.blocks: (bytes(8), 2)}, {}),
        ("no-room", {0: (bytes(8), 10 * MANY)}, {}),
        ("no-room", {block: (bytes(8), 8 * MANY) for block in range(6)}, {}),
        ("bad-adapter", {0: (bytes(8), 3)}, {}),
        ("bad-message", {0: (bytes(1 << 18), 2)}, {}),
    ],
    ids=["another model", "no such block", "10 MiB a block", "too much in all", "damaged", "larger than it says"],
)
@simulated
async def test_bad_adapters_are_refused_and_nothing_is_kept(
    code: str, parts: dict[int, tuple[bytes, int]], changes: dict[str, bytes]
) -> None:
    budget = BudgetPolicy(adapter_bytes=100 * MANY)
    async with open_world(link_policy=LinkPolicy(budget=budget), serve_policy=BRIEF) as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            connection = await connection_to(router, ALL_BLOCKS)
            adapter = make_adapter(changes.get("model_digest", MODEL.digest), parts)
            with pytest.raises(PeerRefused) as refused:
                await connection.adapters.using(adapter, ALL_BLOCKS, 10.0, trio.lowlevel.checkpoint)
            assert refused.value.code == code
            assert not node.worker.executor.adapters
            await trio.sleep(2 * BRIEF.adapter_idle_s)
            nothing_is_left(swarm)
            good = drawn_adapter(random.Random(6))
            await there_and_back(SwarmPasses(router.finder, Codec.RAW), 1, LENGTHS, good)


@simulated
async def test_malformed_frames_about_adapters_are_refused() -> None:
    async with world() as swarm:
        node = await swarm.start("one", SPANS[0])
        async with swarm.client() as (router, _):
            connection = await connection_to(router, SPANS[0])
            adapter = drawn_adapter(random.Random(7))
            manifest = adapter.manifest

            async def offer(payload: bytes, digest: bytes = manifest.digest, span: Span = SPANS[0]) -> None:
                meta = pack(AdapterUse(digest, span.start, span.end))
                await connection.ask_peer(FrameType.ADAPTER, FrameType.LACKING, 10.0, meta, payload)

            async def bring(payload: bytes, block: int = 0, digest: bytes = manifest.digest) -> None:
                meta = pack(AdapterPart(digest, block))
                await connection.ask_peer(FrameType.PART, FrameType.HELD, 10.0, meta, payload)

            backwards = Manifest(MODEL.digest, manifest.parts[::-1])
            empty = Manifest(MODEL.digest, (PartName(0, 0, bytes(32)),))
            for code, call in (
                ("bad-message", lambda: offer(b"")),
                ("bad-message", lambda: offer(manifest.packed[:-1])),
                ("bad-message", lambda: offer(manifest.packed, bytes(32))),
                ("bad-message", lambda: offer(backwards.packed, backwards.digest)),
                ("bad-message", lambda: offer(empty.packed, empty.digest)),
                ("span-not-held", lambda: offer(manifest.packed, span=Span(1, 3))),
                ("unknown-adapter", lambda: bring(adapter.parts[0])),
            ):
                with pytest.raises(PeerRefused) as refused:
                    await call()
                assert refused.value.code == code
            await offer(manifest.packed)
            for code, call in (
                ("bad-message", lambda: bring(adapter.parts[0] + b"0")),
                ("bad-message", lambda: bring(adapter.parts[1])),
                ("span-not-held", lambda: bring(adapter.parts[3], 3)),
                ("unknown-adapter", lambda: bring(adapter.parts[0], 0, bytes(32))),
            ):
                with pytest.raises(PeerRefused) as refused:
                    await call()
                assert refused.value.code == code
            assert not node.worker.executor.adapters
            await bring(adapter.parts[0])
            await bring(adapter.parts[0])
            assert node.worker.executor.adapters == {manifest.digest: {0: adapter.parts[0]}}


@simulated
async def test_parts_with_other_bytes_than_named_cost_their_link() -> None:
    policy = replace(GENEROUS, malformed_burst=4, malformed_per_s=0.01)
    async with open_world(serve_policy=policy) as swarm:
        await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            connection = await connection_to(router, ALL_BLOCKS)
            adapter = drawn_adapter(random.Random(7))
            use, part = AdapterUse(adapter.digest, 0, MODEL.blocks), AdapterPart(adapter.digest, 0)
            ask = partial(connection.ask_peer, timeout_s=10.0)
            await ask(FrameType.ADAPTER, FrameType.LACKING, meta=pack(use), payload=adapter.manifest.packed)
            for _ in range(policy.malformed_burst + 1):
                with pytest.raises(PeerRefused, match="not the part of block 0"):
                    await ask(FrameType.PART, FrameType.HELD, meta=pack(part), payload=b"other bytes")
            with pytest.raises(PeerUnreachable):
                await ask(FrameType.PART, FrameType.HELD, meta=pack(part), payload=adapter.parts[0])


@simulated
async def test_a_link_brings_a_few_parts_at_a_time_and_is_told_to_come_again() -> None:
    most = GENEROUS.adapter_parts_per_link
    async with world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            connection = await connection_to(router, ALL_BLOCKS)
            adapter = drawn_adapter(random.Random(7))
            use = pack(AdapterUse(adapter.digest, 0, MODEL.blocks))
            await connection.ask_peer(FrameType.ADAPTER, FrameType.LACKING, 10.0, use, adapter.manifest.packed)

            async def bring(block: int) -> None:
                meta = pack(AdapterPart(adapter.digest, block))
                await connection.ask_peer(FrameType.PART, FrameType.HELD, 10.0, meta, adapter.parts[block])

            assert node.server.served is not None
            busy = node.server.served.adapters._one_change  # as if its worker took a part
            async with trio.open_nursery() as nursery, busy:
                for block in range(most):
                    nursery.start_soon(bring, block)
                await trio.sleep(1)
                with pytest.raises(PeerRefused) as refused:
                    await bring(most)
                assert refused.value.code == "busy" and refused.value.retry_after_s
            await bring(most)
            assert node.worker.executor.adapters[adapter.digest].keys() == set(range(most + 1))


@simulated
async def test_a_backward_whose_adapter_gradients_exceed_an_answer_is_refused_and_a_forward_is_not() -> None:
    adapter = drawn_adapter(random.Random(9))
    most_bytes = FP32 * adapter.manifest.values(ALL_BLOCKS) - 1
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=5.0))
    for allowed_bytes in (most_bytes + 1, most_bytes):
        async with open_world(serve_policy=replace(GENEROUS, adapter_gradient_bytes=allowed_bytes)) as swarm:
            await swarm.start("one", ALL_BLOCKS)
            async with swarm.client(policy) as (router, _):
                client = SwarmPasses(router.finder, Codec.RAW)
                if allowed_bytes > most_bytes:
                    await there_and_back(client, 1, LENGTHS, adapter)
                    continue
                await client.outputs(ALL_BLOCKS, [3], exact_input(random.Random(1), 3), adapter)
                with pytest.raises((NoRoute, SessionLost), match="gradients are too large"):
                    await there_and_back(client, 1, LENGTHS, adapter)


@simulated
async def test_an_adapter_in_use_makes_way_for_no_other_and_one_client_for_itself_first() -> None:
    size = 100
    budget = BudgetPolicy(adapter_bytes=4 * (ENTRY_BYTES + 1024), group_share=0.5, peer_share=0.5)
    async with open_world(link_policy=LinkPolicy(budget=budget)) as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client(name="one client") as (router, _), swarm.client(name="another") as (other, _):
            fixed = make_adapter(MODEL.digest, {0: (bytes(FP32 * size), size)})
            theirs = make_adapter(MODEL.digest, {0: (bytes(FP32 * size - 1) + b"2", size)})
            there = await connection_to(other, ALL_BLOCKS)
            await there.adapters.using(theirs, ALL_BLOCKS, 10.0, trio.lowlevel.checkpoint)
            here = await connection_to(router, ALL_BLOCKS)
            async with router.open_session(8, Codec.RAW, adapter=fixed) as session:
                for number in range(20):
                    more = make_adapter(MODEL.digest, {1: (number.to_bytes(4, "big") * size, size)})
                    await here.adapters.using(more, ALL_BLOCKS, 10.0, trio.lowlevel.checkpoint)
                    held = node.worker.executor.adapters
                    assert {fixed.digest, theirs.digest, more.digest} <= held.keys()
                    assert len(held) <= 4
                large = make_adapter(MODEL.digest, {1: (bytes(FP32 * 6 * size), 6 * size)})
                with pytest.raises(PeerRefused, match="no memory is left"):
                    await here.adapters.using(large, ALL_BLOCKS, 10.0, trio.lowlevel.checkpoint)
                hidden = exact_input(random.Random(1), 1)
                assert bytes(await session.step(hidden)) == exact_output(hidden, ALL_BLOCKS, fixed.parts)
