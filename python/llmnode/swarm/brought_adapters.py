"""The adapters that a server has got from us over one connection. A part is sent again if the server has dropped it."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.errors import PeerRefused, PeerTimeout, RemoteProtocolError
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode, pack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.frame import Buffer, Frame

    Ask = Callable[[FrameType, FrameType, float, bytes, Buffer], Awaitable[Frame]]
    """Sends a question with metadata and payload, and returns its answer, which is due in some seconds."""

T = TypeVar("T")

MOST_REMEMBERED = 16
"""The most adapters. About others the server is asked again, which costs a round trip."""
TRIES = 3
"""A server whose memory is short may drop an adapter before we use it."""
BYTES_PER_S = 1 << 16
"""The slowest upload that is waited for."""
_BLOCK = struct.Struct("<I")


class BroughtAdapters:
    """One at a time is brought: several tasks may want the same."""

    def __init__(self, ask: Ask, peer: PeerId) -> None:
        """`ask` is the connection's `ask_peer`, to `peer`."""
        self._ask = ask
        self._peer = peer
        self._brought: OrderedDict[bytes, set[int]] = OrderedDict()
        self._one_by_one = trio.Lock()
        self.is_unable = False
        """The peer knows no adapters."""

    async def using(self, adapter: Adapter, span: Span, timeout_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """Have the server hold the parts of `adapter` in the blocks of `span`, and then `ask` for something.

        It is brought again if the server refuses since it has dropped it. All of it is to be there within `timeout_s`
        and the time that its bytes take at `BYTES_PER_S`. Raises the errors of `ask`, and PeerError.
        """
        size_bytes = sum(len(adapter.parts[each.block]) for each in adapter.manifest.within(span))
        most_s = timeout_s + size_bytes / BYTES_PER_S
        for tries_left in reversed(range(TRIES)):
            with trio.move_on_after(most_s) as patience:
                await self._bring(adapter, span, most_s)
            if patience.cancelled_caught:
                raise PeerTimeout(f"did not take the adapter in {most_s:g} s", peer=self._peer)
            try:
                return await ask()
            except PeerRefused as refusal:
                if refusal.code != RefusalCode.UNKNOWN_ADAPTER or not tries_left:
                    raise
                self._brought.pop(adapter.digest, None)
        raise AssertionError("the last try returns or raises")

    async def _bring(self, adapter: Adapter, span: Span, timeout_s: float) -> None:
        wanted = {each.block for each in adapter.manifest.within(span)}
        async with self._one_by_one:
            brought = self._brought.setdefault(adapter.digest, set())
            self._brought.move_to_end(adapter.digest)
            if wanted and wanted <= brought:
                return
            for block in await self._lacking(adapter, span, timeout_s):
                if block not in wanted:
                    raise RemoteProtocolError(f"lacks block {block}, which {span} has no part for").blame(self._peer)
                meta = pack(AdapterPart(adapter.digest, block))
                part = adapter.parts[block]
                await self._ask(FrameType.PART, FrameType.HELD, timeout_s, meta, part)
            brought |= wanted
            while len(self._brought) > MOST_REMEMBERED:
                self._brought.popitem(last=False)

    async def _lacking(self, adapter: Adapter, span: Span, timeout_s: float) -> list[int]:
        meta, manifest = pack(AdapterUse(adapter.digest, span.start, span.end)), adapter.manifest.packed
        try:
            answer = await self._ask(FrameType.ADAPTER, FrameType.LACKING, timeout_s, meta, manifest)
        except PeerRefused as refusal:
            self.is_unable = refusal.code == RefusalCode.UNKNOWN_FRAME
            raise
        if len(answer.payload) % _BLOCK.size or len(answer.payload) > _BLOCK.size * len(span):
            raise RemoteProtocolError(f"{len(answer.payload)} bytes that are no list of blocks").blame(self._peer)
        return [block for (block,) in _BLOCK.iter_unpack(answer.payload)]
