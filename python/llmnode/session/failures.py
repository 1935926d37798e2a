"""The failures on the way of a step, and the recoveries that came of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable, SessionLost
from llmnode.wire.chunk_path import ALL_WOULD_REFUSE
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span
    from llmnode.session.peer_finder import PeerFinder

CAUSES_KEPT = 16
"""A step keeps its first failures, and the latest."""

FAILED_COMPUTATIONS = 8
"""One step may meet this many of one peer. It is asked again only after all others: then the fault is the step's."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A peer was lost, and others took its place."""

    lost: PeerId
    span: Span
    taken_over_by: tuple[PeerId, ...]
    positions: int
    """The number of positions that were replayed."""
    stall_s: float
    """The time from the moment that the loss was noticed until the session could go on."""
    cause: str
    """The error by which the loss was noticed, for people to read."""


@dataclass(slots=True)
class StepFailures:
    """The failures on the way of one step, through all hops and recoveries."""

    causes: list[PeerError] = field(default_factory=list)
    failed: set[PeerId] = field(default_factory=set)
    """The peers that failed since every peer was asked. Each is asked once: a dead cheap one must not hide another."""
    cut_off: set[PeerId] = field(default_factory=set)
    """Lost hops that could not be reached, or have the session no more. They may take it again, and are asked before
    the client waits for any peer."""
    silent: set[PeerId] = field(default_factory=set)
    """The peers that have not answered in this step. Each has cost a whole deadline: others are asked again first."""
    blaming: set[PeerId] = field(default_factory=set)
    """Those of the `failed` peers that say that the session itself is at fault."""
    is_disputed: bool = False
    """Hops that were to take a place have contradicted each other. The next ones do not push to each other."""
    failed_computations: Counter[PeerId | None] = field(default_factory=Counter)
    deadline_s: float = math.inf
    room_in_s: float = 0.0
    """The shortest wait for room that a peer named since every peer was asked; 0 if none did."""

    def avoided(self, *, hurry: bool) -> set[PeerId]:
        """The peers that are not asked to take a place."""
        return self.failed if hurry else self.failed | self.cut_off

    def ask_all_again(self) -> None:
        self.failed = set(self.silent) if self.failed - self.silent else set()
        self.blaming.clear()
        self.cut_off.clear()
        self.room_in_s = 0.0

    def check_agreement(self) -> None:
        """To be called when there is no other peer to ask. Raises SessionLost if all blame the session.

        One peer's word is not enough, and several may be one stranger's: while there are others, they are asked.
        """
        if self.blaming and self.blaming >= self.failed and not self.cut_off:
            raise SessionLost(self.causes) from self.causes[-1]

    def note_lost(self, failure: PeerError, finder: PeerFinder) -> None:
        """A hop of the session failed. Raises as `note`."""
        self.note(failure, finder)
        was_moved = isinstance(failure, PeerRefused) and failure.code == RefusalCode.UNKNOWN_SESSION
        if (was_moved or isinstance(failure, PeerUnreachable)) and failure.peer in self.failed:
            self.failed.remove(failure.peer)
            self.cut_off.add(failure.peer)

    def note(self, error: PeerError, finder: PeerFinder) -> None:
        """Raises SessionLost if a peer has failed to compute the step many times, and no other peer has done it."""
        finder.report(error)
        self.causes = [*self.causes[: CAUSES_KEPT - 1], error]
        if error.peer is not None:
            self.failed.add(error.peer)
        if isinstance(error, PeerTimeout) and error.peer is not None:
            self.silent.add(error.peer)
        if isinstance(error, PeerRefused):
            if error.retry_after_s is not None:
                self.room_in_s = min(self.room_in_s or math.inf, error.retry_after_s)
            if error.code in ALL_WOULD_REFUSE and error.peer is not None:
                self.blaming.add(error.peer)
            self.failed_computations[error.peer] += error.code == RefusalCode.COMPUTE_FAILED
            if self.failed_computations[error.peer] > FAILED_COMPUTATIONS:
                raise SessionLost(self.causes) from error
