"""The adapters that come over one link: what the server lacks of them, and their parts."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from llmnode.core.ids import AdapterId
from llmnode.core.span import Span
from llmnode.errors import RemoteProtocolError
from llmnode.wire.adapter import unpack_manifest
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import unpack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.node.serve.link_requests import LinkRequests
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.ports import Link

    _Answer = Callable[[], Awaitable[Frame]]

REQUESTS = frozenset({FrameType.ADAPTER, FrameType.PART})


class LinkAdapters:
    """The client of one link asks with `requests`."""

    def __init__(self, link: Link, requests: LinkRequests, holder_of: Callable[[Span], ServedSpan]) -> None:
        """`holder_of` gives the loaded blocks of a span, or raises PeerRefused."""
        self._link = link
        self._requests = requests
        self._holder_of = holder_of

    def begin(self, frame: Frame) -> None:
        """Do what a frame asks for, in a task. Raises RemoteProtocolError or PeerRefused for what cannot be."""
        answer = self._offered(frame) if frame.type is FrameType.ADAPTER else self._brought(frame)
        self._requests.begin(frame, answer)

    def _offered(self, frame: Frame) -> _Answer:
        asked, manifest = unpack(AdapterUse, frame.meta), unpack_manifest(frame.payload)
        if asked.span_start >= asked.span_end or manifest.digest != asked.adapter:
            raise RemoteProtocolError("ADAPTER: no span, or a manifest that its digest is not of")
        span = Span(asked.span_start, asked.span_end)
        store = self._holder_of(span).adapters

        async def answer() -> Frame:
            blocks = await store.lacking(self._link, manifest, span)
            return _answer(FrameType.LACKING, frame, struct.pack(f"<{len(blocks)}I", *blocks))

        return answer

    def _brought(self, frame: Frame) -> _Answer:
        part = unpack(AdapterPart, frame.meta)
        store = self._holder_of(Span(part.block, part.block + 1)).adapters

        async def answer() -> Frame:
            held = _answer(FrameType.HELD, frame)
            if not await store.bring(AdapterId(part.adapter), part.block, frame.payload):
                await self._requests.wait_turn(held)
            return held

        return answer


def _answer(kind: FrameType, frame: Frame, payload: bytes = b"") -> Frame:
    return Frame(kind, frame.session, frame.epoch, frame.step, payload=payload)
