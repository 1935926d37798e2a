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

    `elapsed_us` is from the latest of our sending, the output of the hop before and this hop's output of the chunk
    before, to this hop's output. It contains queue and compute, which are the peer's word.
    """

    peer: PeerId
    span: Span
    elapsed_us: int
    queue_us: int
    compute_us: int
    direct: bool
    """Its input came from the hop before, and not from the client."""
    beside: float = 0.0
    """The positions of this client's other steps that were at the peer in this time, on average."""


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
    """None if they were pushed: then only the hop has them, in its log."""
    pushed: bool
    """The hop that computed them has sent them to the next one."""

    @staticmethod
    def of(payload: Buffer) -> Hidden:
        """The hidden states that the client itself sends."""
        return Hidden(_native.blake3_digest(payload), payload, pushed=False)


@dataclass(frozen=True, slots=True)
class HopOutput:
    """The output of a hop for one chunk, with the message that came with it."""

    hidden: Hidden
    said: Result
    timing: HopTiming
