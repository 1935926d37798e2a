"""The frames that a link has still to write: small ones first, and large ones in pieces between which small ones pass.

On a link that is never idle, the large ones get at least half: a piece goes out after small frames of the same total
size.

Knows neither streams nor time; `link.py` writes what it is given here.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, TypeAlias

from llmnode.core.ids import NO_SESSION, SessionId, Step
from llmnode.wire.frame import Frame, FrameType, encode, encode_parts

if TYPE_CHECKING:
    from llmnode.core.policy import LinkPolicy
    from llmnode.wire.frame import Buffer

Order: TypeAlias = tuple[SessionId, Step]
"""Frames of one order must not pass each other."""

GENTLE_PIECE_BYTES = 1 << 15
"""No piece is larger soon after a small frame: the next one waits until it is written."""
GENTLE_BYTES = 1 << 22
"""After a small frame, large frames go in such small pieces for this many bytes."""


class Outbox:
    """Frames in the order in which they go out: within each session, and each step of none, that in which they came."""

    def __init__(self, policy: LinkPolicy) -> None:
        self._policy = policy
        self.piece_bytes = policy.piece_bytes
        """The size of a piece of a large frame, and the bytes of small ones between two pieces. On a slow line less
        than the policy's."""
        self._small: deque[Frame] = deque()
        self._large: deque[Frame] = deque()
        self._behind: Counter[Order] = Counter()  # frames among the large ones: what follows must not pass them
        self._is_prepared = [False, False]  # the first of the small, and of the large ones
        self._passed_bytes = 0  # by small frames, since the last piece of a large one
        self._gentle_bytes = 0  # of large frames, until pieces are large again
        self._rest: deque[memoryview] = deque()  # of the first of the large ones, encoded
        self.size_bytes = 0
        self.added = 0, 0
        """The small and the large frames that were added in all."""
        self.taken = 0, 0
        """Those of them that were taken to the end."""

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def add(self, frame: Frame) -> None:
        size_bytes = frame.size_bytes
        self.size_bytes += size_bytes
        if size_bytes <= self._policy.piece_bytes and _order(frame) not in self._behind:
            self._small.append(frame)
            self.added = self.added[0] + 1, self.added[1]
        else:
            self._large.append(frame)
            self.added = self.added[0], self.added[1] + 1
            self._behind[_order(frame)] += 1

    @property
    def _next_piece_bytes(self) -> int:
        return min(self.piece_bytes, GENTLE_PIECE_BYTES) if self._gentle_bytes > 0 else self.piece_bytes

    @property
    def _is_small_next(self) -> bool:
        return bool(self._small) and not (self._large and self._passed_bytes >= self._next_piece_bytes)

    @property
    def next_to_prepare(self) -> Frame | None:
        """The frame that `take` would begin, unless it is prepared already."""
        if self._is_small_next:
            return None if self._is_prepared[0] else self._small[0]
        return self._large[0] if self._large and not self._is_prepared[1] else None

    def prepare(self, frame: Frame, crossing: Frame) -> None:
        """Have what was `next_to_prepare` go out as `crossing`, in its place."""
        queue = int(not (self._small and self._small[0] is frame))
        (self._small, self._large)[queue][0] = crossing
        self._is_prepared[queue] = True
        if crossing is not frame:
            self.size_bytes += crossing.size_bytes - frame.size_bytes

    def take(self) -> bytes | None:
        """The bytes to write next, until they are written: a whole frame or a piece of one. None if nothing waits.

        Raises LocalProtocolError for a frame that no link may carry.
        """
        if self._is_small_next:
            frame = self._small.popleft()
            self._is_prepared[0] = False
            self.taken = self.taken[0] + 1, self.taken[1]
            self.size_bytes -= frame.size_bytes
            return self.encode_small(frame)
        if not self._large:
            return None
        self._passed_bytes = 0
        if not self._rest:
            self._rest.extend(memoryview(part) for part in encode_parts(self._large[0], self._policy) if part)
        size_bytes = self._next_piece_bytes
        self._gentle_bytes -= size_bytes
        piece = self._next_piece(size_bytes)
        if not self._rest:
            self._forget(self._large.popleft())
            self._is_prepared[1] = False
            self.taken = self.taken[0], self.taken[1] + 1
        return encode(Frame(FrameType.PIECE, payload=piece), self._policy)

    def encode_small(self, frame: Frame) -> bytes:
        """The bytes of a small frame that is written next. If nothing waits, it need not be added before.

        Raises as `take`.
        """
        data = encode(frame, self._policy)
        self._passed_bytes += len(data)
        self._gentle_bytes = GENTLE_BYTES
        return data

    def _next_piece(self, size_bytes: int) -> Buffer:
        """A piece of the first large frame, which is not copied as a whole."""
        parts: list[memoryview] = []
        while size_bytes and self._rest:
            part = self._rest.popleft()
            parts.append(part[:size_bytes])
            if len(part) > size_bytes:
                self._rest.appendleft(part[size_bytes:])
            size_bytes -= len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _forget(self, frame: Frame) -> None:
        self.size_bytes -= frame.size_bytes
        order = _order(frame)
        self._behind[order] -= 1
        if not self._behind[order]:
            del self._behind[order]


def _order(frame: Frame) -> Order:
    """Without a session each step is a question of its own, and its answer."""
    return frame.session, frame.step if frame.session == NO_SESSION else Step(0)
