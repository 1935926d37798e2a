"""The window of a stream: how much the other side may send ahead of our reading, within the budget.

The protocol machine lets a window grow with what is read, and with the time between reads, but never beyond the size
that it is told. The bytes that are read tell when the window may grow next. Then its next size is reserved, and the
machine is told. A stream for which there is no memory keeps the window that it has, and asks again later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.budget import Resource

if TYPE_CHECKING:
    from llmnode.core.budget import Scope

KIB = 1 << 10
FIRST_BYTES = 256 * KIB
"""Every stream has this window. It is reserved with the stream (`stream_bytes`)."""
GROWTH = 4
"""A window becomes this many times as large when it grows, in `transport_rs/src/yamux`."""
LARGEST_BYTES = 16 << 20


class Window:
    """The window of one stream. `scope` is that of its connection."""

    __slots__ = ("_left_bytes", "_reserved_bytes", "_scope", "size_bytes")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._left_bytes = FIRST_BYTES // 2
        """The bytes that may be read before the window may grow: half of it."""
        self._reserved_bytes = 0
        self.size_bytes = FIRST_BYTES
        """The size to which the window may grow at the next read."""

    @property
    def may_read(self) -> int:
        """The most bytes that may be read at once. It reserves the size to which that lets the window grow."""
        if self._left_bytes <= 1:
            self._grow()
        return self._left_bytes - 1

    def note_read(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes

    def close(self) -> None:
        """The stream is over. Safe to call twice."""
        if self._reserved_bytes:
            for resource in (Resource.WINDOWS, Resource.MEMORY):
                self._scope.release(resource, self._reserved_bytes)
            self._reserved_bytes = 0
        self.size_bytes = LARGEST_BYTES  # nothing more is reserved

    def _grow(self) -> None:
        larger_bytes = min(GROWTH * self.size_bytes, LARGEST_BYTES)
        more_bytes = larger_bytes - self.size_bytes
        wanted = {Resource.WINDOWS: more_bytes, Resource.MEMORY: more_bytes}
        # Others may be evicted for the first growth alone: what comes after it is for speed.
        reserve_all = self._scope.take_all if self.size_bytes == FIRST_BYTES else self._scope.reserve_all
        if more_bytes and reserve_all(wanted):
            self._reserved_bytes += more_bytes
            self.size_bytes = larger_bytes
            self._left_bytes = self.size_bytes // 2
        else:  # asking may mean looking for a connection to evict
            self._left_bytes = LARGEST_BYTES // 2
