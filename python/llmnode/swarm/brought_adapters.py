"""The adapters that a server has got from us over one connection. A part is sent again if the server has dropped it."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.core.peers.peer_speed import PeerSpeed
from llmnode.errors import PeerRefused, RemoteProtocolError, single_error
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode, pack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span
    from llmnode.swarm.uploads import Lane
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.frame import Buffer, Frame

    Ask = Callable[[FrameType, FrameType, float, bytes, Buffer], Awaitable[Frame]]
    """Sends a question with metadata and payload, and returns its answer, which is due in some seconds."""

T = TypeVar("T")

MOST_REMEMBERED = 16
"""The most adapters. About others the server is asked again, which costs a round trip."""
PARTS_AT_ONCE = 3
"""Parts that are on their way to a server. It takes 4 over one link, and counts one until its answer is sent."""
TRIES = 3
"""A server whose memory is short may drop an adapter before we use it."""
BYTES_PER_S = 1 << 16
"""The slowest upload that is waited for."""
_BLOCK = struct.Struct("<I")


class BroughtAdapters:
    """One at a time is brought: several tasks may want the same."""

    def __init__(self, ask: Ask, peer: PeerId, lane: Lane) -> None:
        """`ask` is the connection's `ask_large`, to `peer`."""
        self._ask = ask
        self._peer = peer
        self._lane = lane
        self._brought: OrderedDict[bytes, set[int]] = OrderedDict()
        self._one_by_one = trio.Lock()
        self.heard_s = -math.inf
        """When the peer has answered last."""
        self.taken_bytes = 0
        """Those of all parts that the peer has taken."""
        self.took = PeerSpeed()
        """How long the peer took to take all parts that it lacked, by their bytes."""
        self.is_unable = False
        """The peer knows no adapters."""

    def lacking_bytes(self, adapter: Adapter, span: Span) -> int:
        """The bytes of its parts in the blocks of `span` that were not brought yet, as far as one knows."""
        brought = self._brought.get(adapter.digest, ())
        return sum(
            len(adapter.parts[each.block]) for each in adapter.manifest.within(span) if each.block not in brought
        )

    async def using(self, adapter: Adapter, span: Span, timeout_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """Have the server hold the parts of `adapter` in the blocks of `span`, and then `ask` for something.

        It is brought again if the server refuses since it has dropped it. Raises the errors of `ask` and `bring`.
        """
        for tries_left in reversed(range(TRIES)):
            await self.bring(adapter, span, timeout_s)
            try:
                return await ask()
            except PeerRefused as refusal:
                if refusal.code != RefusalCode.UNKNOWN_ADAPTER or not tries_left:
                    raise
                self._brought.pop(adapter.digest, None)
        raise AssertionError("the last try returns or raises")

    async def bring(self, adapter: Adapter, span: Span, timeout_s: float) -> None:
        """Have the server hold the parts of `adapter` in the blocks of `span`.

        All of it is to be there within `timeout_s` and the time that its bytes take at `BYTES_PER_S`, beside the time
        in which we write. Raises PeerError.
        """
        size_bytes = sum(len(adapter.parts[each.block]) for each in adapter.manifest.within(span))
        most_s = timeout_s + size_bytes / BYTES_PER_S
        with self._lane.patience(most_s, self._peer, "take the adapter"):
            await self._bring(adapter, span, most_s)

    async def _bring(self, adapter: Adapter, span: Span, timeout_s: float) -> None:
        wanted = {each.block for each in adapter.manifest.within(span)}
        async with self._one_by_one:
            brought = self._brought.setdefault(adapter.digest, set())
            self._brought.move_to_end(adapter.digest)
            if wanted and wanted <= brought:
                return
            lacking = await self._lacking(adapter, span, timeout_s)
            if others := set(lacking) - wanted:
                what = f"lacks block {min(others)}, which {span} has no part for"
                raise RemoteProtocolError(what).blame(self._peer)
            began_s = trio.current_time()
            await self._send(adapter, lacking, timeout_s)
            if sent_bytes := sum(len(adapter.parts[block]) for block in set(lacking)):
                self.took.note(sent_bytes, trio.current_time() - began_s)
            brought |= wanted
            while len(self._brought) > MOST_REMEMBERED:
                self._brought.popitem(last=False)

    async def _send(self, adapter: Adapter, blocks: Sequence[int], timeout_s: float) -> None:
        """Send the parts of these `blocks`, some at once: the next ones are on their way while the server takes one."""
        waiting = iter(dict.fromkeys(blocks))

        async def send_some() -> None:
            for block in waiting:
                await self._send_part(adapter, block, timeout_s)

        with single_error():
            async with trio.open_nursery() as nursery:
                for _ in range(min(PARTS_AT_ONCE, len(blocks))):
                    nursery.start_soon(send_some)

    async def _send_part(self, adapter: Adapter, block: int, timeout_s: float) -> None:
        meta = pack(AdapterPart(adapter.digest, block))
        for is_last in (False, True):
            try:
                await self._ask(FrameType.PART, FrameType.HELD, timeout_s, meta, adapter.parts[block])
                self.heard_s = trio.current_time()
                self.taken_bytes += len(adapter.parts[block])
                return
            except PeerRefused as refusal:
                if is_last or refusal.code != RefusalCode.BUSY or refusal.retry_after_s is None:
                    raise
                await trio.sleep(min(refusal.retry_after_s, timeout_s))

    async def _lacking(self, adapter: Adapter, span: Span, timeout_s: float) -> list[int]:
        meta, manifest = pack(AdapterUse(adapter.digest, span.start, span.end)), adapter.manifest.packed
        try:
            answer = await self._ask(FrameType.ADAPTER, FrameType.LACKING, timeout_s, meta, manifest)
        except PeerRefused as refusal:
            self.is_unable = refusal.code == RefusalCode.UNKNOWN_FRAME
            raise
        self.heard_s = trio.current_time()
        if len(answer.payload) % _BLOCK.size or len(answer.payload) > _BLOCK.size * len(span):
            raise RemoteProtocolError(f"{len(answer.payload)} bytes that are no list of blocks").blame(self._peer)
        return [block for (block,) in _BLOCK.iter_unpack(answer.payload)]
