"""Large questions wait at the client until its uplink has a place for them, and their time begins when they are sent.

A client with a slow uplink may have many passes for many servers at once. If all of them were sent at once, each link
would be too slow to be kept. And each server would be blamed for the time that the others' passes took.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.core.links.uplink import SHARE_BYTES_PER_S, UplinkRate
from llmnode.errors import PeerTimeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from llmnode.core.ids import PeerId


GRACE_S = 10.0
SLOWER = 2
"""An upload that takes this many times as long as at its share has no place any more: it holds up no others."""


class Uploads:
    """Those of one client. A few peers are sent something at a time, by the rate of the uplink."""

    def __init__(self) -> None:
        self._rate = UplinkRate()
        self._held: dict[object, float] = {}
        """Until when each upload has its place at most."""
        self._next = trio.Lock()
        self._changed = trio.Event()

    @asynccontextmanager
    async def place(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a place. The context may go on when it has none any more."""
        upload = object()
        async with self._next:
            while (free_s := self._free_from_s()) > trio.current_time():
                with trio.move_on_at(free_s):
                    await self._changed.wait()
            most_s = GRACE_S + SLOWER * size_bytes / SHARE_BYTES_PER_S
            self._held[upload] = trio.current_time() + most_s
        try:
            yield
        finally:
            del self._held[upload]
            self._wake()

    def note(self, size_bytes: int, began_s: float) -> None:
        """An upload that began at `began_s` has ended."""
        self._rate.note(size_bytes, began_s, trio.current_time())
        self._wake()

    def _free_from_s(self) -> float:
        """When there is a place, unless an upload ends before."""
        last = sorted(self._held.values(), reverse=True)
        return last[self._rate.at_once - 1] if len(last) >= self._rate.at_once else -math.inf

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class Lane:
    """The uploads of one connection, which go one after another."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._one_by_one = trio.Lock()
        self.begun_s = -math.inf
        """When the latest upload has got its place."""
        self.waits = False
        """One waits for a place: the peer has no fault in that."""
        self._own_s = 0.0
        self._own_since_s: float | None = None
        self._left_s: dict[trio.CancelScope, float] = {}
        """The contexts that wait for the peer, and the time that each has left besides our own."""

    @asynccontextmanager
    async def turn(self, size_bytes: int) -> AsyncIterator[None]:
        """A context in which a question of this size is written."""
        async with self._one_by_one:
            self._own_since_s = now_s = trio.current_time()
            self.waits = True
            for scope in self._left_s:
                self._left_s[scope], scope.deadline = scope.deadline - now_s, math.inf
            try:
                async with self._uploads.place(size_bytes):
                    self.begun_s, self.waits = trio.current_time(), False
                    yield
                    self._uploads.note(size_bytes, self.begun_s)
            finally:
                self.waits, now_s = False, trio.current_time()
                self._own_s += now_s - self._own_since_s
                self._own_since_s = None
                for scope, left_s in self._left_s.items():
                    scope.deadline = now_s + left_s

    def stopwatch(self) -> Callable[[], float]:
        """A function that returns the time from now on in which we write or wait for a place."""
        began_s = self._own()
        return lambda: self._own() - began_s

    def _own(self) -> float:
        since_s = self._own_since_s
        return self._own_s if since_s is None else self._own_s + trio.current_time() - since_s

    @contextmanager
    def patience(self, most_s: float, peer: PeerId, what: str) -> Iterator[None]:
        """A context that may take `most_s` besides our own time. Raises PeerTimeout, which says that the peer did not
        do `what`.
        """
        with trio.CancelScope() as scope:
            self._left_s[scope] = most_s
            if self._own_since_s is None:
                scope.deadline = trio.current_time() + most_s
            try:
                yield
            finally:
                del self._left_s[scope]
        if scope.cancelled_caught:
            raise PeerTimeout(f"did not {what} in {most_s:g} s", peer=peer)
