"""Where the passes of one client wait: a server does a few at a time, and the others wait at the client.

A pass that waits may still go to another server, where it would end sooner: a server may have got slow, or be faster
than it seemed. The first of a queue looks for one when its turn comes, and the last of each queue when a pass is over,
or every LOOKS_AGAIN_S: a server that is silent ends none.
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import trio

from llmnode.core.peers.at_once import AtOnce
from llmnode.core.peers.pass_loads import AT_FIRST
from llmnode.session.pass_routes import LOOKS_AGAIN_S, PassRoutes
from llmnode.wire.refusal import memory_in_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from llmnode.core.peers.pass_loads import PassLoad
    from llmnode.core.span import Span
    from llmnode.errors import PeerError
    from llmnode.session.pass_tries import PassTries
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.swarm.peer_connection import PeerConnection

AT_ONCE = 4
"""Microbatches that one server has together. It takes this number of passes over one link."""


@dataclass(slots=True, eq=False)
class _Waiting:
    goes_elsewhere: Callable[[], bool]
    is_woken: trio.Event = field(default_factory=trio.Event)
    has_turn: bool = False


@dataclass(slots=True, eq=False)
class _Queue:
    """That of one connection."""

    at_once: AtOnce = field(default_factory=lambda: AtOnce(AT_ONCE))
    has_worked: bool = False
    under_way: int = 0
    waiting: deque[_Waiting] = field(default_factory=deque)

    @property
    def has_place(self) -> bool:
        return self.under_way < (self.at_once.number if self.has_worked else AT_FIRST)

    async def turn(self, goes_elsewhere: Callable[[], bool]) -> bool:
        """Wait for a turn, which is to be given back. False if the pass is to go elsewhere."""
        if self.has_place and not self.waiting:
            self.under_way += 1
            return True
        own = _Waiting(goes_elsewhere)
        self.waiting.append(own)
        try:
            while not own.is_woken.is_set():
                with trio.move_on_after(LOOKS_AGAIN_S):
                    await own.is_woken.wait()
                if not own.is_woken.is_set() and own is self.waiting[-1]:
                    self.look_again()
        except trio.Cancelled:
            if own.has_turn:
                self.give_back()
            elif own in self.waiting:
                self.waiting.remove(own)
            raise
        return own.has_turn

    def give_back(self) -> None:
        """The next pass has the turn, unless it goes elsewhere."""
        self.under_way -= 1
        while self.waiting and self.has_place:
            first = self.waiting.popleft()
            first.has_turn = not first.goes_elsewhere()
            self.under_way += first.has_turn
            first.is_woken.set()

    def look_again(self) -> None:
        """Have the last pass go elsewhere, if that is better."""
        if self.waiting and self.waiting[-1].goes_elsewhere():
            self.waiting.pop().is_woken.set()


class Turn(NamedTuple):
    """A pass through `blocks` is at a server now."""

    blocks: Span
    connection: PeerConnection
    load: PassLoad


class PassTurns:
    """A server that has no memory for some passes of ours beside each other gets fewer at a time, for a while."""

    def __init__(self, finder: PeerFinder) -> None:
        self.routes = PassRoutes(finder)
        self._queues: WeakKeyDictionary[PeerConnection, _Queue] = WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, tries: PassTries, span: Span, weight: int) -> AsyncIterator[Turn]:
        """A context in which a server does a pass of this `weight` through the first blocks of `span`, or all of them.

        Raises as `PassTries.next_hop`.
        """
        left: _Queue | None = None
        while True:
            blocks, connection, load = await tries.next_hop(span, weight)
            queue = self._queues.setdefault(connection, _Queue())
            try:
                if left is not None and left is not queue:
                    left.look_again()
                left = queue
                if not await queue.turn(partial(tries.goes_elsewhere, load, span, weight)):
                    continue
                load.began_s = trio.current_time()
                yield Turn(blocks, connection, load)
                return
            finally:
                self.routes.loads.take_back(load)
                if load.began_s is not None:
                    queue.give_back()
                    for each in [*self._queues.values()]:
                        each.look_again()

    def answered(self, turn: Turn) -> None:
        """The server has nothing to do for the pass any more. The turn goes on, for what the client does with it."""
        self.routes.loads.take_back(turn.load)

    def has_fewer(self, connection: PeerConnection, error: PeerError) -> bool:
        """Whether the `error` of a pass only says that the server had no memory for it beside others of ours."""
        queue = self._queues[connection]
        if memory_in_s(error) is None or queue.under_way < 2:
            return False
        queue.at_once.refused(queue.under_way)
        return True

    def worked(self, connection: PeerConnection) -> None:
        """The server has done a pass."""
        queue = self._queues[connection]
        queue.has_worked = True
        queue.at_once.worked()
