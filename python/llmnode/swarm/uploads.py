"""Large questions wait at the client until its uplink has a place for them, and their time begins when they are sent.

A client with a slow uplink may have many passes for many servers at once. If all of them were sent at once, each link
would be too slow to be kept. And each server would be blamed for the time that the others' passes took.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio

from llmnode.core.links.uplink import SHARE_BYTES_PER_S, UplinkRate
from llmnode.errors import PeerError, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from llmnode.core.ids import PeerId


StartSoon: TypeAlias = "Callable[[Callable[[], Awaitable[None]]], None]"
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

    async def take_place(self, size_bytes: int) -> object:
        """Wait for a place, which `give_back` takes. The upload may go on when it has none any more."""
        upload = object()
        async with self._next:
            while (free_s := self._free_from_s()) > trio.current_time():
                with trio.move_on_at(free_s):
                    await self._changed.wait()
            most_s = GRACE_S + SLOWER * size_bytes / SHARE_BYTES_PER_S
            self._held[upload] = trio.current_time() + most_s
        return upload

    def give_back(self, upload: object) -> None:
        """The upload has ended."""
        del self._held[upload]
        self._wake()

    def note(self, size_bytes: int, began_s: float) -> None:
        """An upload that began at `began_s` is written."""
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

    def __init__(self, uploads: Uploads, written: Callable[[], Awaitable[None]], start_soon: StartSoon) -> None:
        """`written` waits until the system has taken what was sent; `start_soon` runs it while the connection lives."""
        self._uploads = uploads
        self._written = written
        self._start_soon = start_soon
        self._rest: trio.Event | None = None
        """Set when the rest of an upload is written that was given up."""
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
        """A context in which a question of this size is written.

        If it is given up its bytes still go out. Until they are written it keeps its place, and the next one waits.
        """
        async with self._one_by_one:
            self._own_since_s = now_s = trio.current_time()
            self.waits = True
            for scope in self._left_s:
                self._left_s[scope], scope.deadline = scope.deadline - now_s, math.inf
            try:
                if self._rest is not None:
                    await self._rest.wait()
                upload = await self._uploads.take_place(size_bytes)
                self.begun_s, self.waits = trio.current_time(), False
                try:
                    yield
                except PeerError:  # the link has ended
                    self._uploads.give_back(upload)
                    raise
                except BaseException:
                    self._give_up(upload, size_bytes)
                    raise
                self._uploads.note(size_bytes, self.begun_s)
                self._uploads.give_back(upload)
            finally:
                self.waits, now_s = False, trio.current_time()
                self._own_s += now_s - self._own_since_s
                self._own_since_s = None
                for scope, left_s in self._left_s.items():
                    scope.deadline = now_s + left_s

    def _give_up(self, upload: object, size_bytes: int) -> None:
        over = trio.Event()
        try:
            self._start_soon(partial(self._write_rest, upload, size_bytes, self.begun_s, over))
        except RuntimeError:  # the connection has ended, and its nursery
            self._uploads.give_back(upload)
        else:
            self._rest = over

    async def _write_rest(self, upload: object, size_bytes: int, began_s: float, over: trio.Event) -> None:
        try:
            with suppress(PeerError):  # the link has ended
                await self._written()
                self._uploads.note(size_bytes, began_s)
        finally:
            self._uploads.give_back(upload)
            over.set()

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
            raise PeerTimeout(f"did not {what} in {most_s:g} s", peer=peer).after(most_s)
