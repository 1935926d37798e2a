"""The window of a stream: how much the other side may send ahead of our reading, within the budget.

The protocol machine lets a window grow with what is read, and with the time between reads. It does not say when. So the
bytes that are read tell when it may have grown. From then on its largest possible size is reserved. A stream for which
there is no more memory has a slow clock: its window stays as it is. Only the first growth does not depend on the clock;
without memory for that the stream is not read any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.budget import Resource

if TYPE_CHECKING:
    from llmnode.core.budget import Scope

KIB = 1 << 10
GROWTHS = (
    (128 * KIB, 768 * KIB),
    (512 * KIB, 3072 * KIB),
    (2048 * KIB, 12288 * KIB),
)
"""Once this much was read since the last growth, half of a window, it may grow by this much: from 256 KiB to 16 MiB, in
`transport_rs/src/yamux`. The first window is reserved with the stream (`stream_bytes`)."""
SLOW_S = 1e6
"""On a slow clock this time passes between two reads: no window grows over such a time."""
ANY_BYTES = 1 << 30


class Window:
    """The window of one stream. `scope` is that of its connection."""

    __slots__ = ("_growths", "_left_bytes", "_reserved_bytes", "_scope", "_slow_s")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._growths = 0
        self._left_bytes = GROWTHS[0][0]
        """The bytes that may be read before the window may grow."""
        self._reserved_bytes = 0
        self._slow_s = 0.0

    @property
    def may_read(self) -> int:
        """The most bytes that may be read now. It reserves memory for what that may lead to; 0 if there is none."""
        if self._left_bytes <= 1 and not self._grow():
            return 0
        return self._left_bytes - 1

    def note_read(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes

    def time_s(self, now_s: float) -> float:
        """The time to tell the machine at a read."""
        if not self._slow_s:
            return now_s
        self._slow_s = max(self._slow_s, now_s) + SLOW_S
        return self._slow_s

    def close(self) -> None:
        """The stream is over. Safe to call twice."""
        if self._reserved_bytes:
            for resource in (Resource.WINDOWS, Resource.MEMORY):
                self._scope.release(resource, self._reserved_bytes)
            self._reserved_bytes = 0

    def _grow(self) -> bool:
        """Whether there is memory, or the window will not grow."""
        has_ended = self._scope.is_closed  # with the connection: the bytes that have arrived may be read
        if has_ended or self._slow_s or self._growths == len(GROWTHS):
            self._left_bytes = ANY_BYTES
            return True
        more_bytes = GROWTHS[self._growths][1]
        is_first = not self._growths
        wanted = {Resource.WINDOWS: more_bytes, Resource.MEMORY: more_bytes}
        if is_first:
            has_memory = self._scope.take_all(wanted)
        else:  # it is for speed alone: nobody is evicted for it
            has_memory = self._scope.reserve_all(wanted)
        if not has_memory and is_first:
            return False
        if has_memory:
            self._reserved_bytes += more_bytes
            self._growths += 1
        else:
            self._slow_s = SLOW_S
        is_last = not has_memory or self._growths == len(GROWTHS)
        self._left_bytes = ANY_BYTES if is_last else GROWTHS[self._growths][0]
        return True
