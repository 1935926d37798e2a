"""The adapters that come over one link: what the server lacks of them, and their parts. Each frame has a task."""

from __future__ import annotations

import logging
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.core.account import Account
from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import AdapterId
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, RemoteProtocolError
from llmnode.wire.adapter import unpack_manifest
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import AdapterPart, AdapterUse, RefusalCode, unpack
from llmnode.wire.refusal import refusal_for, refusal_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import ServePolicy
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.ports import Link

    _Answer = Callable[[], Awaitable[Frame]]

log = logging.getLogger(__name__)

REQUESTS = frozenset({FrameType.ADAPTER, FrameType.PART})
_RETRY_S = 0.5


class LinkAdapters:
    """Its tasks are in `nursery`. They hold what has arrived in the scope of the link."""

    def __init__(
        self,
        link: Link,
        nursery: trio.Nursery,
        policy: ServePolicy,
        holder_of: Callable[[Span], ServedSpan],
        on_bug: Callable[[PeerId, Exception], None],
    ) -> None:
        """`holder_of` gives the loaded blocks of a span, or raises PeerRefused; `on_bug` is that of the server."""
        self._link = link
        self._nursery = nursery
        self._policy = policy
        self._holder_of = holder_of
        self._on_bug = on_bug
        self._scopes: set[trio.CancelScope] = set()

    def begin(self, frame: Frame) -> None:
        """Do what a frame asks for, in a task. Raises RemoteProtocolError or PeerRefused for what cannot be."""
        answer = self._offered(frame) if frame.type is FrameType.ADAPTER else self._brought(frame)
        if len(self._scopes) >= self._policy.adapter_parts_per_link:
            raise PeerRefused(RefusalCode.BUSY, "too many parts of adapters are under way", retry_after_s=_RETRY_S)
        account = Account(self._link.scope.open(Kind.SESSION, "a part of an adapter"), Resource.PASSES)
        if not account.resize(frame.size_bytes):
            account.scope.close()
            raise PeerRefused(RefusalCode.BUSY, "no memory is left for this part now", retry_after_s=_RETRY_S)
        self._scopes.add(scope := trio.CancelScope())
        self._nursery.start_soon(self._run, frame, answer, account, scope)

    def close(self) -> None:
        """The link has ended: nobody waits for what is under way."""
        for scope in self._scopes:
            scope.cancel()

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
            await store.bring(AdapterId(part.adapter), part.block, frame.payload)
            return _answer(FrameType.HELD, frame)

        return answer

    async def _run(self, frame: Frame, answer: _Answer, account: Account, scope: trio.CancelScope) -> None:
        try:
            with scope:
                try:
                    await self._link.send(await answer())
                except (PeerRefused, RemoteProtocolError) as error:
                    await self._link.send(refusal_for(frame, error))
        except PeerError as error:
            log.debug("not answered: %s", error)
        except Exception as error:  # noqa: BLE001  one part that nobody foresaw is not to end the server
            reason = f"this server failed in a way that nobody foresaw: {type(error).__name__}"
            with suppress(PeerError):
                await self._link.send(refusal_of(frame, RefusalCode.COMPUTE_FAILED, reason))
            self._on_bug(self._link.peer, error)
        finally:
            self._scopes.discard(scope)
            account.scope.close()


def _answer(kind: FrameType, frame: Frame, payload: bytes = b"") -> Frame:
    return Frame(kind, frame.session, frame.epoch, frame.step, payload=payload)
