"""The hidden states between two hops of a session, kept for a peer that takes the place of a lost hop."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmnode.wire.frame import Buffer
    from llmnode.wire.payload import HiddenForm


class PayloadLog:
    """Encoded hidden states by position: the bytes that crossed the wire, so a replay computes what was computed."""

    def __init__(self, form: HiddenForm) -> None:
        self.positions = 0
        self.size_bytes = 0
        self._form = form
        self._pieces: list[tuple[Buffer, int]] = []

    def append(self, payload: Buffer, length: int) -> None:
        self._pieces.append((payload, length))
        self.positions += length
        self.size_bytes += len(payload)

    def truncate(self, positions: int) -> None:
        while self.positions > positions:
            payload, length = self._pieces.pop()
            self.positions -= length
            self.size_bytes -= len(payload)
            if (kept := positions - self.positions) > 0:
                self.append(self._form.cut((payload, length), 0, kept), kept)

    def copy(self) -> PayloadLog:
        """A log of its own, of the same pieces."""
        other = PayloadLog(self._form)
        other.positions, other.size_bytes, other._pieces = self.positions, self.size_bytes, list(self._pieces)
        return other

    def shared_with(self, other: PayloadLog) -> int:
        """The number of positions before the first piece that is not the same object in both."""
        alike = takewhile(lambda pair: pair[0][0] is pair[1][0], zip(self._pieces, other._pieces, strict=False))
        return sum(length for (_, length), _ in alike)

    def pieces(self, positions: int) -> Iterator[tuple[Buffer, int]]:
        """The first `positions` as they were appended: payloads with their numbers of positions."""
        for payload, length in self._pieces:
            kept = min(length, positions)
            if kept:
                yield (payload if kept == length else self._form.cut((payload, length), 0, kept)), kept
            positions -= kept

    def chunks(self, most: int) -> Iterator[tuple[Buffer, int]]:
        """All of it as payloads of at most `most` positions each, if none was longer from the start."""
        gathered: list[tuple[Buffer, int]] = []
        for piece in self._pieces:
            if gathered and sum(length for _, length in gathered) + piece[1] > most:
                yield self._joined(gathered)
                gathered = []
            gathered.append(piece)
        if gathered:
            yield self._joined(gathered)

    def read(self, start: int, length: int) -> Buffer:
        """The positions from `start` on, as one payload. They must be there, and at least one."""
        wanted: list[tuple[Buffer, int]] = []
        at = 0
        for payload, positions in self._pieces:
            first, last = max(start - at, 0), min(start + length - at, positions)
            if first < last:
                whole = last - first == positions
                piece = payload if whole else self._form.cut((payload, positions), first, last)
                wanted.append((piece, last - first))
            at += positions
        return self._form.join(wanted)

    def _joined(self, pieces: list[tuple[Buffer, int]]) -> tuple[Buffer, int]:
        return self._form.join(pieces), sum(length for _, length in pieces)
