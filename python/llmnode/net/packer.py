"""Packs the payloads that a link sends, where that pays (`core/links/packing.py`), and unpacks those that it receives.

A receiver of a link tells the sender how fast the link is; a receiver that does so can unpack. Long payloads are packed
in a thread. Knows no stream.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode import _native
from llmnode.core.links.packing import PackChoice
from llmnode.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.policy import LinkPolicy
    from llmnode.wire.frame import Buffer, Frame

T = TypeVar("T")

MOST_TIMES_PACKED = 4
"""A payload takes at most this many times the bytes that it was packed into: half of them are never compressed."""


class Packer:
    """Both directions of one link."""

    def __init__(self, policy: LinkPolicy) -> None:
        self._policy = policy
        self._choice = PackChoice(policy.packing)

    def take_rate(self, bytes_per_s: float) -> None:
        """The link is this fast, as the other side has told."""
        self._choice.bytes_per_s = bytes_per_s

    async def pack(self, frame: Frame) -> Frame:
        """`pack_at_once`, in a thread if the frame is long."""
        return await self._in_thread_if_long(partial(self.pack_at_once, frame), len(frame.payload))

    def pack_at_once(self, frame: Frame) -> Frame:
        """The frame as it crosses the link: packed, or as it is if that pays more."""
        choice, kind, size = self._choice, frame.value_bytes, len(frame.payload)
        if choice.wants_sample(kind, size):
            for _ in range(2):  # the first finds cold caches
                self._pack(frame, memoryview(frame.payload)[: self._policy.packing.sample_bytes])
        if not choice.pays(kind, size):
            return frame
        packed = self._pack(frame, frame.payload)
        return replace(frame, payload=packed, packed=True) if len(packed) < size else frame

    async def unpack(self, frame: Frame) -> Frame:
        """The frame as its sender gave it to the link. Raises RemoteProtocolError."""
        return await self._in_thread_if_long(partial(self._unpack, frame), len(frame.payload))

    def most_unpacked_bytes(self, frame: Frame) -> int:
        return min(MOST_TIMES_PACKED * len(frame.payload), self._policy.max_payload_bytes)

    def _pack(self, frame: Frame, part: Buffer) -> bytes:
        """Its time is the processor's: on a busy machine a thread that has to wait would make packing seem dear."""
        began_s = time.thread_time()
        packed = _native.pack(part, frame.value_bytes)
        took_s = time.thread_time() - began_s
        self._choice.note(frame.value_bytes, len(frame.payload), len(part), len(packed), took_s)
        return packed

    def _unpack(self, frame: Frame) -> Frame:
        began_s = time.thread_time()
        try:
            payload = _native.unpack(frame.payload, self._policy.max_payload_bytes)
        except ValueError as error:
            raise RemoteProtocolError(f"{frame.type.name}: {error}") from error
        self._choice.note_unpacked(len(payload), time.thread_time() - began_s)
        return replace(frame, payload=memoryview(payload), packed=False)

    async def _in_thread_if_long(self, work: Callable[[], T], size_bytes: int) -> T:
        return await trio.to_thread.run_sync(work) if size_bytes >= self._policy.packing.in_thread_bytes else work()
