"""The uplink of a peer, which all of its links share: each that has something to send gets the same part of it."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.wire.frame import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

PASSES_BYTES = 1 << 12
"""Smaller frames pass others, as over a real link, and take no time, unless one of their step is before them."""
DONE_BYTES = 1e-6


class Uplink:
    """Frames of each link go one after another, and those of several links beside each other."""

    def __init__(self, bytes_per_s: float, call_at: Callable[[float, Callable[[], None]], None]) -> None:
        self._bytes_per_s = bytes_per_s
        self._call_at = call_at
        self._queues: dict[Hashable, deque[_Leaving]] = {}
        self._noted_s = 0.0
        self._plans = 0

    def passes(self, link: Hashable, frame: Frame) -> bool:
        """Whether `frame` need not wait for others."""
        behind = any(each.step == (frame.session, frame.step) for each in self._queues.get(link, ()))
        return frame.size_bytes < PASSES_BYTES and not behind

    def add(self, link: Hashable, frame: Frame, leave: Callable[[], None]) -> None:
        """`leave` is called when all of the frame has been sent."""
        self._advance()
        leaving = _Leaving(frame, leave)
        self._queues.setdefault(link, deque()).append(leaving)
        self._plan()

    def drop(self, link: Hashable) -> None:
        """The link has ended: its frames are not sent."""
        self._advance()
        self._queues.pop(link, None)
        self._plan()

    def _advance(self) -> None:
        now_s = trio.current_time()
        for queue in self._queues.values():
            queue[0].left_bytes -= (now_s - self._noted_s) * self._bytes_per_s / len(self._queues)
        self._noted_s = now_s

    def _plan(self) -> None:
        self._plans += 1
        least_bytes = min((queue[0].left_bytes for queue in self._queues.values()), default=math.inf)
        if least_bytes < math.inf:
            left_s = max(0.0, least_bytes) * len(self._queues) / self._bytes_per_s
            self._call_at(trio.current_time() + left_s, partial(self._look, self._plans))

    def _look(self, plan: int) -> None:
        if plan != self._plans:  # others have begun or ended since
            return
        self._advance()
        done = [link for link, queue in self._queues.items() if queue[0].left_bytes <= DONE_BYTES]
        left = [self._queues[link].popleft() for link in done]
        self._queues = {link: queue for link, queue in self._queues.items() if queue}
        for each in left:
            each.leave()
        self._plan()


class _Leaving:
    def __init__(self, frame: Frame, leave: Callable[[], None]) -> None:
        self.step = frame.session, frame.step
        self.left_bytes: float = frame.size_bytes
        self.leave = leave
