"""Answers outside of sessions that cost no worker anything: of adapters that are here, of passes that are refused."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio

from llmnode.core.ids import Step
from llmnode.core.model import FP32_BYTES
from llmnode.core.policy import ServePolicy
from llmnode.errors import PeerError, PeerUnreachable
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import open_world
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import DEADLINE_MS, Refusal, RefusalCode, pack, unpack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields
from simulation.adapters import drawn_adapter
from simulation.pushes import answers
from simulation.world import ALL_BLOCKS, MODEL, ROW, simulated

POLICY = ServePolicy()
ADAPTER = drawn_adapter(random.Random(1))
AT_ONCE, ROUNDS = POLICY.passes_per_link, 120
NOT_FINITE = b"\x00\x00\xc0\x7f" * (ROW // FP32_BYTES)


def offered() -> Frame:
    meta = pack(AdapterUse(ADAPTER.digest, ALL_BLOCKS.start, ALL_BLOCKS.end))
    return Frame(FrameType.ADAPTER, meta=meta, payload=ADAPTER.manifest.packed)


def brought(digest: bytes = ADAPTER.digest) -> Frame:
    return Frame(FrameType.PART, meta=pack(AdapterPart(digest, 0)), payload=ADAPTER.parts[0])


def asked(kind: FrameType, payload: bytes, **extensions: Any) -> Frame:  # Any: each extension has its own values
    span = ALL_BLOCKS.start, ALL_BLOCKS.end
    profile = profile_fields(MODEL.profile)
    model, dtype, adapter = profile["model_digest"], profile["dtype"], profile["adapter"]
    terms = Pass(model, *span, dtype, Codec.RAW, "training", [1], adapter, extensions or None)
    return Frame(kind, meta=pack(terms), payload=payload)


IDLE = {
    "an adapter that is here": (offered(), FrameType.LACKING),
    "a part that is here": (brought(), FrameType.HELD),
    "a part that nobody expects": (brought(bytes(32)), FrameType.REFUSAL),
    "a pass whose time is over": (asked(FrameType.EVALUATE, bytes(ROW), **{DEADLINE_MS: 1}), FrameType.REFUSAL),
}
MALFORMED = {
    "a forward": asked(FrameType.EVALUATE, NOT_FINITE),
    "a backward": asked(FrameType.BACKWARD, bytes(ROW) + NOT_FINITE),
}


@pytest.mark.parametrize("kind", IDLE)
@simulated
async def test_what_costs_no_worker_anything_is_answered_at_a_bounded_rate(kind: str) -> None:
    frame, answer = IDLE[kind]
    requests = POLICY.requests
    async with open_world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        link = await swarm.internet.network("rude", "9.9.9.9").dial(node.network.addresses[0])
        polite = await swarm.internet.network("polite", "8.8.8.8").dial(node.network.addresses[0])
        for each in offered(), brought():
            await link.send(each)
            await answers(link, 1)
        async with open_connection(polite) as connection:
            began_s = trio.current_time()
            for _ in range(ROUNDS):
                for number in range(AT_ONCE):
                    await link.send(replace(frame, step=Step(number)))
                assert {each.type for each in await answers(link, AT_ONCE)} == {answer}
                asked_s = trio.current_time()
                await connection.describe(5)
                assert trio.current_time() - asked_s < 1
            took_s = trio.current_time() - began_s
    assert took_s > (AT_ONCE * ROUNDS - requests.burst) / (requests.per_s + requests.shared_per_s) - 0.5


@pytest.mark.parametrize("kind", MALFORMED)
@simulated
async def test_passes_with_numbers_that_are_not_finite_cost_the_link(kind: str) -> None:
    async with open_world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        link = await swarm.internet.network("rude", "9.9.9.9").dial(node.network.addresses[0])
        for _ in range(POLICY.malformed_burst):
            await link.send(MALFORMED[kind])
            (answer,) = await answers(link, 1)
            assert unpack(Refusal, answer.meta).code == RefusalCode.BAD_MESSAGE
        await link.send(MALFORMED[kind])
        with pytest.raises(PeerUnreachable), trio.fail_after(10):
            await answers(link, 2)
        assert not node.server.passes


@simulated
async def test_a_refusal_that_waits_for_its_turn_holds_no_memory_and_ends_with_its_link() -> None:
    few = replace(POLICY, requests=replace(POLICY.requests, burst=1, per_s=1e-6, shared_per_s=1e-6))
    async with open_world(serve_policy=few) as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        link = await swarm.internet.network("rude", "9.9.9.9").dial(node.network.addresses[0])
        memory = node.server.request_memory
        for number in range(POLICY.adapter_parts_per_link):
            await link.send(replace(brought(), step=Step(number)))
        await trio.sleep(1)
        assert not memory._here
        await link.end("enough")
        with suppress(PeerError):
            await link.receive()
        await trio.sleep(1)
        assert not len(node.server.conduct._requests._rate)
