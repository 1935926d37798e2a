"""What a session needs to know to outlive its servers: who else there is, what failed, and what came of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.errors import PeerError, PeerRefused, PeerUnreachable, SessionLost
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span
    from llmnode.session.peer_finder import PeerFinder

CAUSES_KEPT = 16
"""Of one step: the first failures, and the latest."""

FAILED_COMPUTATIONS = 8
"""That one step may meet at one span; after more the fault is taken to be its own."""

ALL_WOULD_REFUSE = {
    RefusalCode.WRONG_POSITION,
    RefusalCode.STALE_EPOCH,
    RefusalCode.TOO_FAR_AHEAD,
    RefusalCode.CONFLICT,
    RefusalCode.BAD_MESSAGE,
}
"""What the session itself has done wrong. With any other refusal, of an unknown code too, others may accept it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A peer was lost, and others took its place."""

    lost: PeerId
    span: Span
    taken_over_by: tuple[PeerId, ...]
    positions: int
    """How many were given again."""
    stall_s: float
    """From the moment that the loss was noticed until the session could go on."""
    cause: str
    """What the loss was noticed by, for people to read."""


@dataclass(slots=True)
class StepFailures:
    """What failed on the way of one step, through whatever hops and recoveries."""

    causes: list[PeerError] = field(default_factory=list)
    failed: set[PeerId] = field(default_factory=set)
    """Since everybody was asked: each is asked once, so that one who is dead and cheap does not hide one who lives."""
    cut_off: set[PeerId] = field(default_factory=set)
    """Lost hops that could not be reached. They may be back, and are asked before we wait for anybody."""
    failed_computations: Counter[Span | None] = field(default_factory=Counter)
    deadline_s: float = math.inf
    room_in_s: float = 0.0
    """The shortest wait for room that anybody named since everybody was asked; 0 if nobody did."""

    def avoided(self, *, hurry: bool) -> set[PeerId]:
        """Whom not to ask to take a place."""
        return self.failed if hurry else self.failed | self.cut_off

    def ask_all_again(self) -> None:
        self.failed.clear()
        self.cut_off.clear()
        self.room_in_s = 0.0

    def note_lost(self, failure: PeerError, finder: PeerFinder) -> None:
        """A hop of the session failed. Raises as `note`."""
        self.note(failure, finder)
        if isinstance(failure, PeerUnreachable) and failure.peer in self.failed:
            self.failed.remove(failure.peer)
            self.cut_off.add(failure.peer)

    def note(self, error: PeerError, finder: PeerFinder) -> None:
        """Raises SessionLost for what others would not do better."""
        finder.report(error)
        self.causes = [*self.causes[: CAUSES_KEPT - 1], error]
        if error.peer is not None:
            self.failed.add(error.peer)
        if isinstance(error, PeerRefused):
            if error.retry_after_s is not None:
                self.room_in_s = min(self.room_in_s or math.inf, error.retry_after_s)
            self.failed_computations[error.span] += error.code == RefusalCode.COMPUTE_FAILED
            if error.code in ALL_WOULD_REFUSE or self.failed_computations[error.span] > FAILED_COMPUTATIONS:
                raise SessionLost(self.causes) from error
