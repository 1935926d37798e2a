"""The deep prompts of sessions at a server: checked, held and given back, whatever becomes of their session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import AdapterId, SessionId
from llmnode.core.model import FP32_BYTES
from llmnode.net.host import open_network
from llmnode.net.link import Libp2pLink
from llmnode.wire.adapter import make_adapter
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import PROMPTS, RefusalCode, pack
from unit.in_trio import in_trio
from unit.links import MODEL, POLICY, ROW, answer_to, open_frame, refusal_to, served, session_id

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
