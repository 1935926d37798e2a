"""Positions on their way through the hops of a session: which they are, what goes between two hops, what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode import _native

if TYPE_CHECKING:
    from llmnode.core.ids import Epoch, PeerId, Step
    from llmnode.core.span import Span
    from llmnode.wire.frame import Buffer
    from llmnode.wire.messages import Result


@dataclass(frozen=True, slots=True)
class HopTiming:
    """Where one hop's part of a step went, in microseconds.

    `round_trip_us` is from the output of the hop before, or our sending, or its output of the chunk before, to its own;
    the rest is the peer's word.
    """

    peer: PeerId
    span: Span
    round_trip_us: int
    queue_us: int
    compute_us: int
    direct: bool
    """Its input came from the hop before, not by way of us."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions that go through all hops together, and their number in the session."""

    epoch: Epoch
    step: Step
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states between two hops, in the session's codec."""

    digest: bytes
    payload: Buffer | None
    """Unless they were pushed, and stayed where they are logged."""
    pushed: bool
    """By the hop that put them out, to the next one."""

    @staticmethod
    def of(payload: Buffer) -> Hidden:
        """As we give them."""
        return Hidden(_native.blake3_digest(payload), payload, pushed=False)


@dataclass(frozen=True, slots=True)
class HopOutput:
    """What a hop puts out, and what it says of it."""

    hidden: Hidden
    said: Result
    timing: HopTiming
