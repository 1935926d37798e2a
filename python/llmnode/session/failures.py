"""The failures on the way of a step, and the recoveries that came of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.policy import RecoveryPolicy
from llmnode.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable, SessionLost
from llmnode.session.overflow import AGREEING_GROUPS, OverflowClaims
from llmnode.wire.chunk_path import ALL_WOULD_REFUSE
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    import random

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import RoutePolicy
    from llmnode.core.route import Hop
    from llmnode.core.span import Span
    from llmnode.session.peer_finder import PeerFinder

CAUSES_KEPT = 16
"""A step keeps its first failures, and the latest."""

FAILED_COMPUTATIONS = 8
"""A peer that fails to compute the step more often blames the step. It is asked again only after all others."""

QUICK_S = 1.0
"""A replay or a pass that fails sooner costs a search nothing."""

MOST_DOUBLINGS = 2
"""The longest pause for want of KV doubles this many times."""


class LetGo(PeerRefused):
    """No peer has failed: the session has freed its KV at `hop`, since it or another row waited for KV."""

    def __init__(self, hop: Hop) -> None:
        why = "its KV was freed while this generation waited for KV"
        super().__init__(RefusalCode.UNKNOWN_SESSION, why, peer=hop.peer, span=hop.span)


class Outdone(PeerError):
    """No peer has failed: a hop was left since it is slow, and others are believed to be much faster."""


class Busier(PeerError):
    """No peer has failed: one that was to take a place is busier than was thought, and others are better."""


class Overdue(PeerTimeout):
    """Perhaps no peer has failed: one that is not known was given the time that others need, and may be slower."""


def wants_kv(failure: PeerError) -> bool:
    """Whether the peer has no KV for the session now, and may have some later."""
    if isinstance(failure, LetGo):
        return True
    if not isinstance(failure, PeerRefused) or failure.retry_after_s is None:
        return False
    return failure.code in {RefusalCode.NO_ROOM, RefusalCode.UNKNOWN_SESSION}


def has_lost_kv(lost: PeerError) -> bool:
    """Whether no peer failed, and the session has lost its KV: the search for another one then waits for KV."""
    return wants_kv(lost) or isinstance(lost, Outdone)


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
    """The failures on the way of one step, through all hops and recoveries, since a chunk of it last got through."""

    policy: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    overflow: OverflowClaims = field(default_factory=OverflowClaims)
    """The peers that say that numbers overflow. They are reported when somebody has computed the step."""
    causes: list[PeerError] = field(default_factory=list)
    failed: set[PeerId] = field(default_factory=set)
    """The peers that failed since every peer was asked. Each is asked once: a dead cheap one must not hide another."""
    cut_off: set[PeerId] = field(default_factory=set)
    """Lost hops that could not be reached, or have the session no more. They may take it again, and are asked before
    the client waits for any peer."""
    silent: set[PeerId] = field(default_factory=set)
    """The peers that have not answered in this step. Each has cost a whole deadline: others are asked again first."""
    verdicts: dict[PeerId, str | None] = field(default_factory=dict)
    """The latest failure of each peer in this step: its address group if it says that the session itself is at fault,
    and None if it has failed in another way."""
    is_disputed: bool = False
    """Hops that were to take a place have contradicted each other. The next ones do not push to each other."""
    failed_computations: Counter[PeerId | None] = field(default_factory=Counter)
    deadline_s: float = math.inf
    """The end of the search for a peer."""
    searches: int = 0
    """The hops for which others were looked for."""
    failed_tries: int = 0
    """The replays or passes that a peer began, and did not end."""
    retry_in_s: float = 0.0
    """The shortest wait for free KV that a peer named since every peer was asked; 0 if none did."""
    wants_kv: bool = False
    """A peer has refused for want of KV since every peer was asked."""
    waits_for_kv: int = 0
    """The pauses that were made for want of KV."""

    def begin_search(self, now_s: float, least_s: float = 0.0) -> None:
        """A hop is lost, and others are to be found, for `least_s` at least.

        After too many searches there is no time for another one.
        """
        self.searches += 1
        has_time = self.searches <= self.policy.replacements
        self.deadline_s = now_s + max(least_s, self.policy.timeout_s) if has_time else -math.inf

    def pause_s(self, policy: RoutePolicy, rng: random.Random) -> float:
        """The pause before all peers are asked again. For want of KV it grows, and clients come apart."""
        pause_s = max(policy.retry_s, self.retry_in_s)
        if not self.wants_kv:
            return min(pause_s, policy.longest_pause_s)
        longest_s = policy.longest_pause_s * (1 << min(self.waits_for_kv, MOST_DOUBLINGS))
        self.waits_for_kv += 1
        return min(pause_s, longest_s) * rng.uniform(1, 1.5)

    def add_try(self, took_s: float, *, failed: bool) -> None:
        """A replay or a pass has taken this long. It has a limit of its own, so its time does not count as a search.

        The time of further ones that fail counts, and so does that of all that fail at once.
        """
        if failed and took_s <= QUICK_S:
            return
        self.failed_tries += failed
        if self.failed_tries <= self.policy.failed_tries:
            self.deadline_s += took_s

    def avoided(self, *, hurry: bool) -> set[PeerId]:
        """The peers that are not asked to take a place."""
        return self.failed if hurry else self.failed | self.cut_off

    def ask_all_again(self) -> None:
        self.failed = set(self.silent) if self.failed - self.silent else set()
        self.cut_off.clear()
        self.retry_in_s, self.wants_kv = 0.0, False

    def check_agreement(self, now_s: float) -> None:
        """To be called when there is no other peer to ask. Raises SessionLost if all of them blame the session, and
        NumericOverflow if those are believed that say that numbers overflow.

        One peer's word is not enough, and several may be one stranger's. A peer that has failed in another way may be
        back, and do better.
        """
        self.overflow.check_alone(self.verdicts.keys(), now_s, self.policy.overflow_patience_s)
        groups = set(self.verdicts.values())
        if None not in groups and len(groups) >= AGREEING_GROUPS:
            raise SessionLost(self.causes) from self.causes[-1]

    def got_through(self, finder: PeerFinder | None) -> None:
        """Somebody has computed the step: peers that said that its numbers overflow are reported to the `finder`."""
        if finder is not None:
            for refuted in self.overflow.refuted():
                finder.report(refuted)

    def note_lost(self, failure: PeerError, finder: PeerFinder, now_s: float) -> None:
        """A hop of the session failed, unless it was let go. One that was left as it is slow is asked after others.

        Raises NumericOverflow as `note_uncomputed`.
        """
        if isinstance(failure, LetGo):
            return
        if isinstance(failure, Outdone):
            self._keep(failure)
            return
        if self.note_uncomputed(failure, finder, now_s):
            finder.try_others()
        was_moved = isinstance(failure, PeerRefused) and failure.code == RefusalCode.UNKNOWN_SESSION
        if (was_moved or isinstance(failure, PeerUnreachable)) and failure.peer in self.failed:
            self.failed.remove(failure.peer)
            self.cut_off.add(failure.peer)

    def note_uncomputed(self, error: PeerError, finder: PeerFinder, now_s: float) -> bool:
        """A peer was given what is to be computed, and failed. If it says that numbers overflow, which is returned, it
        is not reported yet. Raises NumericOverflow if that is believed.
        """
        group = None if error.peer is None else finder.group_of(error.peer)
        says_overflow = self.overflow.note(error, group, now_s)
        if says_overflow:
            self._note(error, finder)
        else:
            self.note(error, finder)
        return says_overflow

    def note(self, error: PeerError, finder: PeerFinder) -> None:
        """A peer failed. One that is only overdue is not reported."""
        if not isinstance(error, Overdue):
            finder.report(error)
        self._note(error, finder)

    def _note(self, error: PeerError, finder: PeerFinder) -> None:
        self.wants_kv = self.wants_kv or wants_kv(error)
        self._keep(error)
        if isinstance(error, PeerRefused):
            if error.retry_after_s is not None:
                self.retry_in_s = min(self.retry_in_s or math.inf, error.retry_after_s)
            self.failed_computations[error.peer] += error.code == RefusalCode.COMPUTE_FAILED
        if error.peer is not None:
            self.verdicts[error.peer] = finder.group_of(error.peer) if self._blames_session(error) else None
            if isinstance(error, PeerTimeout):
                self.silent.add(error.peer)

    def _keep(self, error: PeerError) -> None:
        self.causes = [*self.causes[: CAUSES_KEPT - 1], error]
        if error.peer is not None:
            self.failed.add(error.peer)

    def _blames_session(self, error: PeerError) -> bool:
        if not isinstance(error, PeerRefused):
            return False
        return error.code in ALL_WOULD_REFUSE or self.failed_computations[error.peer] > FAILED_COMPUTATIONS
