"""Moves the bytes of circuits through a relay, within its budget. Turns are fair among address groups, and within a
group among peers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError

from llmnode.core.budget import Kind, Resource
from llmnode.core.fair_turns import FairTurns
from llmnode.net.circuit_wire import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from libp2p.abc import IMuxedStream

    from llmnode.core.budget import Scope
    from llmnode.core.policy import RelayPolicy

LEAST_PIECE_BYTES = 1 << 16
"""Circuits move pieces of this size if there is no memory for larger ones."""
WRITES_AT_ONCE = 1
"""Circuits that have a turn at the same time. With more, a group with one circuit could not use half of the turns."""
SLOW_WRITE_S = 0.005
"""A turn ends after this time: then the far side is slow, and not the relay."""


class Splices:
    """Gives each side of a circuit what the other one sends. For all circuits of a relay."""

    def __init__(self, policy: RelayPolicy) -> None:
        self._policy = policy
        self._fair: FairTurns[trio.Event] = FairTurns()
        self._turns: dict[trio.Event, float] = {}  # until when they last

    @contextlib.contextmanager
    def memory(self, around: Scope) -> Iterator[int]:
        """Memory for one circuit, within the scope of the connection that asked for it: the bytes of a piece, or 0."""
        scope = around.open(Kind.SESSION, "a circuit")
        try:
            if not scope.take(Resource.MEMORY, 2 * LEAST_PIECE_BYTES):
                yield 0
            elif scope.reserve(Resource.MEMORY, 2 * (PIECE_BYTES - LEAST_PIECE_BYTES)) is None:
                yield PIECE_BYTES
            else:
                yield LEAST_PIECE_BYTES
        finally:
            scope.close()

    async def splice(self, one: IMuxedStream, other: IMuxedStream, path: Sequence[str], piece_bytes: int) -> bool:
        """Until both have ended, or nothing has moved for long. Each is written to no faster than it takes it.

        `path` has the address group and the peer that asked for the circuit.
        False if it did not end in order: one side was cut, was silent, or sent more than it may.
        """
        in_order = True
        idle = trio.CancelScope(deadline=trio.current_time() + self._policy.circuit_idle_s)

        async def pump(source: IMuxedStream, sink: IMuxedStream) -> None:
            nonlocal in_order
            left = self._policy.circuit_bytes
            try:
                while data := await source.read(min(piece_bytes, left + 1)):
                    left -= len(data)
                    if left < 0:
                        break
                    idle.deadline = trio.current_time() + self._policy.circuit_idle_s
                    await self._write(sink, data, path)
            except MuxedStreamEOF:
                await sink.close()
                return
            except MuxedStreamError:
                pass
            in_order = False
            nursery.cancel_scope.cancel()

        with idle:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pump, one, other)
                nursery.start_soon(pump, other, one)
        return in_order and not idle.cancelled_caught

    async def _write(self, sink: IMuxedStream, data: bytes, path: Sequence[str]) -> None:
        turn, began_s = await self._turn(path), trio.current_time()
        try:
            await sink.write(data)
        finally:
            self._turns.pop(turn, None)
            self._fair.note(path, min(trio.current_time() - began_s, SLOW_WRITE_S))
            self._wake()

    async def _turn(self, path: Sequence[str]) -> trio.Event:
        """Wait until it is the turn of this circuit, and take it."""
        turn = trio.Event()
        if not self._fair and self._has_free_turn():
            self._begin(turn)
            return turn
        self._fair.wait(path, turn)
        try:
            while not turn.is_set():
                self._wake()
                with trio.move_on_at(min(self._turns.values(), default=trio.current_time())):
                    await turn.wait()
        except BaseException:
            if turn.is_set():
                self._turns.pop(turn, None)
                self._wake()
            else:
                self._fair.give_up(path, turn)
            raise
        return turn

    def _begin(self, turn: trio.Event) -> None:
        self._turns[turn] = trio.current_time() + SLOW_WRITE_S

    def _has_free_turn(self) -> bool:
        if len(self._turns) < WRITES_AT_ONCE:
            return True
        now_s = trio.current_time()
        self._turns = {turn: until_s for turn, until_s in self._turns.items() if until_s > now_s}
        return len(self._turns) < WRITES_AT_ONCE

    def _wake(self) -> None:
        """Those that wait take the turns that have ended."""
        while self._fair and self._has_free_turn() and (turn := self._fair.next()) is not None:
            self._begin(turn)
            turn.set()
