"""The deep prompts of sessions at a server: checked, held and given back, whatever becomes of their session."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import AdapterId, Epoch, SessionId, Step
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.core.policy import ServePolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.net.host import open_network
from llmnode.net.link import Libp2pLink
from llmnode.node.serve.opened_terms import OpenedTerms
from llmnode.wire.adapter import make_adapter
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import PROMPTS, ForkRequest, Lease, Leased, RefusalCode, pack, unpack
from llmnode.wire.payload import Codec, HiddenForm
from unit.in_trio import in_trio
from unit.links import DESCRIBE, MODEL, POLICY, ROW, answer_to, open_frame, refusal_to, served, session_id, step_frame

SIZE = MODEL.blocks * ROW
"""The bytes of one prompt before each block."""


def open_with_prompts(session: SessionId, positions: int, payload: bytes | None = None, **changes: Any) -> Frame:
    frame = open_frame(session, extensions={PROMPTS: [1, positions]}, **changes)
    return replace(frame, payload=bytes(positions * SIZE) if payload is None else payload)


async def bring_adapter(link: Libp2pLink) -> bytes:
    """An adapter for the first block. Returns its digest."""
    adapter = make_adapter(MODEL.digest, {0: (bytes(FP32_BYTES), 1)})
    use, part = AdapterUse(adapter.digest, 0, MODEL.blocks), AdapterPart(adapter.digest, 0)
    await answer_to(link, Frame(FrameType.ADAPTER, meta=pack(use), payload=adapter.manifest.packed))
    assert (
        await answer_to(link, Frame(FrameType.PART, meta=pack(part), payload=adapter.parts[0]))
    ).type is FrameType.HELD
    return adapter.digest


@in_trio
async def test_a_session_without_memory_for_its_prompts_leaves_its_adapter_and_nothing_else(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        process = swarm.network.budget.process
        link = await network.dial(swarm.address)
        adapter = await bring_adapter(link)
        before = [*process.within(Kind.SESSION)]
        limit = process.limit(Resource.MEMORY)
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY] + SIZE)
        assert (await refusal_to(link, open_with_prompts(session_id(), 3, adapter=adapter))).code == RefusalCode.BUSY
        assert [*process.within(Kind.SESSION)] == before
        assert swarm.server.served is not None
        shelved = swarm.server.served.adapters._shelf.find(AdapterId(adapter))
        assert shelved is not None and not shelved.users, "it may be dropped"
        assert limit is not None
        process.set_limit(Resource.MEMORY, limit)
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_prompts_that_could_never_be_held_are_refused_for_good(exact_worker: Any) -> None:
    """The client is not told to come again: no other session has to end for them."""
    async with served(exact_worker, serve=ServePolicy(session_bytes=0)) as swarm, open_network([], POLICY) as network:
        process = swarm.network.budget.process
        link = await network.dial(swarm.address)
        await answer_to(link, DESCRIBE)
        process.set_limit(Resource.MEMORY, 2 * 3 * SIZE - 1)
        refusal = await refusal_to(link, open_with_prompts(session_id(), 3))
        assert (refusal.code, refusal.retry_after_ms) == (RefusalCode.NO_ROOM, 0)
        assert "deep prompts" in refusal.message


@in_trio
async def test_prompts_are_held_until_their_session_ends_also_over_another_link(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        process = swarm.network.budget.process

        def held_by_sessions() -> list[int]:
            itself = ServePolicy().session_bytes
            return [each.held[Resource.MEMORY] - itself for each in process.within(Kind.SESSION)]

        links = [await network.dial(swarm.address) for _ in range(2)]
        session = session_id()
        await answer_to(links[0], open_with_prompts(session, 3))
        assert held_by_sessions() == [2 * 3 * SIZE], "here, and at the worker"
        assert (await answer_to(links[1], Frame(FrameType.RESUME, session))).type is FrameType.RESUMED
        await links[0].end("not needed any more")
        assert (await answer_to(links[1], step_frame(session, 0, 0))).type is FrameType.RESULT
        assert held_by_sessions() == [2 * 3 * SIZE]
        await links[1].end("done")
        await swarm.check_serves_and_is_empty()
        assert not held_by_sessions()


@in_trio
async def test_a_session_with_prompts_is_not_leased_since_nothing_could_evict_them(exact_worker: Any) -> None:
    generous = ServePolicy(leased_share=1.0)
    async with served(exact_worker, serve=generous) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        for frame, lease_ms in ((open_frame, 30_000), (partial(open_with_prompts, positions=3), 0)):
            await answer_to(link, frame(session := session_id()))
            lease = pack(Lease(lease_ms=30_000, leaves=False))
            leased = await answer_to(link, Frame(FrameType.LEASE, session, meta=lease))
            assert unpack(Leased, leased.meta).lease_ms == lease_ms


@in_trio
async def test_prompts_are_read_only_when_nothing_else_refuses_their_session(exact_worker: Any) -> None:
    """To read them takes time: a client without memory for them, or without its adapter, does not cost that."""
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        process = swarm.network.budget.process
        limit = process.limit(Resource.MEMORY)
        assert limit is not None
        link = await network.dial(swarm.address)
        adapter = await bring_adapter(link)
        unsound = partial(open_with_prompts, positions=1, payload=b"\xff" * SIZE)
        assert (await refusal_to(link, unsound(session_id(), adapter=bytes(32)))).code == RefusalCode.UNKNOWN_ADAPTER
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY])
        assert (await refusal_to(link, unsound(session_id()))).code == RefusalCode.BUSY
        process.set_limit(Resource.MEMORY, limit)
        assert (await refusal_to(link, unsound(session_id(), adapter=adapter))).code == RefusalCode.BAD_MESSAGE
        assert swarm.server.served is not None
        shelved = swarm.server.served.adapters._shelf.find(AdapterId(adapter))
        assert shelved is not None and not shelved.users
        await swarm.check_serves_and_is_empty()


class Uncompared(bytes):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("prompts may have megabytes, and a FORK that compares them a few bytes")

    __hash__ = None  # type: ignore[assignment]


def test_prompts_are_compared_by_a_digest() -> None:
    form = HiddenForm(MODEL.hidden_size, Codec.RAW)
    terms = OpenedTerms(Span(0, 1), form, MODEL.profile, Priority.BATCH, keep_outputs=False)
    ones, again, twos = (
        terms.with_prompts(DeepPrompts(1, 1, 1, Uncompared(bytes([number]) * ROW))).kind for number in (1, 1, 2)
    )
    assert ones == again
    assert twos != ones
    assert terms.with_prompts(NO_PROMPTS).kind == terms.with_prompts(DeepPrompts(0, 0, 0, b"")).kind != ones


@in_trio
async def test_a_session_becomes_no_copy_of_one_with_other_prompts(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        source, alike, other, without = (session_id() for _ in range(4))
        for session in (source, alike):
            await answer_to(link, open_with_prompts(session, 1))
        await answer_to(link, open_with_prompts(other, 1, payload=bytes([1] * SIZE)))
        await answer_to(link, open_frame(without))

        def copy(session: SessionId) -> Frame:
            return Frame(FrameType.FORK, session, Epoch(1), Step(1), meta=pack(ForkRequest(source, 0)))

        assert (await answer_to(link, copy(alike))).type is FrameType.FORKED
        for session in (other, without):
            refusal = await refusal_to(link, copy(session))
            assert refusal.code == RefusalCode.CONFLICT and "prompts" in refusal.message
