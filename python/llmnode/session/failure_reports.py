"""A failure costs a peer a ban, a place in the order of preference, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.errors import PeerFull, PeerRefused, PeerUnreachable
from llmnode.wire.messages import RefusalCode
from llmnode.wire.receipt import Convicted

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.errors import PeerError
    from llmnode.session.peer_records import PeerRecords
    from llmnode.session.trials import Trials

REFUSED_OFFERS = {RefusalCode.WRONG_MODEL, RefusalCode.SPAN_NOT_HELD, RefusalCode.BAD_MESSAGE, RefusalCode.CONFLICT}
"""Refusals of what a peer announces. It may have moved to other blocks, so it is not banned for one."""


class FailureReports:
    """Those of the sessions of one client, for its `records` and `trials`.

    `group_of` gives the address group of a peer that the client is connected to. `try_others` has servers tried that
    have not proved themselves, after a failure in an address group, or one of nobody's.
    """

    def __init__(
        self,
        model: ModelInfo,
        policy: ClientPolicy,
        records: PeerRecords,
        trials: Trials,
        group_of: Callable[[PeerId], str | None],
        try_others: Callable[[str | None], None],
    ) -> None:
        self._model = model
        self._refused_within_s = policy.route.refused_within_s
        self._records = records
        self._trials = trials
        self._group_of = group_of
        self._try_others = try_others

    def report(self, error: PeerError) -> None:
        """A peer failed: others are preferred to it for a while. A refusal for full KV only lasts as it says.

        One that has no place for us now is busy, and costs more for a while. It has failed if it says so too late.
        """
        if error.peer is None:
            return
        records, now_s = self._records, trio.current_time()
        is_new = not records.bans.is_banned(error.peer, now_s)  # one event may fail several sessions
        if isinstance(error, PeerFull):
            records.note_crowded(error.peer, now_s)
        elif isinstance(error, PeerRefused) and error.evicts:
            self._note_evicted(error.peer, error.retry_after_s or 0.0, now_s)
        elif isinstance(error, PeerRefused) and error.retry_after_s is not None:
            records.note_full(error.peer, error.retry_after_s, now_s)
        if self.is_excused(error):
            if isinstance(error, PeerRefused) and error.code in REFUSED_OFFERS:
                self._note_unkept(error.peer)
            elif error.waited_s > self._refused_within_s:
                self._try_others(None)
            return
        if isinstance(error, Convicted):
            records.suspicion.convict(error.peer, now_s)
        records.bans.report(error.peer, now_s, error.waited_s)
        self._trials.note_failed(error.peer)
        if is_new and isinstance(error, PeerFull):  # where it is is not known without its link
            records.standing.note_failed(error.peer, now_s)
            self._try_others(None)
        elif is_new and not isinstance(error, PeerUnreachable):  # that may be our own network's fault
            records.standing.note_failed(error.peer, now_s)
            self._note_unkept(error.peer)

    def is_excused(self, error: PeerError) -> bool:
        """Whether the peer is only busy, or has promised nothing, and did not keep us waiting before it said so.

        A session that goes for others may have waited for any time: they were computed before.
        """
        if isinstance(error, PeerRefused):
            if self._breaks_promise(error):
                return False
            if error.code == RefusalCode.UNKNOWN_SESSION:
                return True
        elif not isinstance(error, PeerFull):
            return False
        return error.waited_s <= self._refused_within_s

    def _breaks_promise(self, refusal: PeerRefused) -> bool:
        """Whether the peer had accepted the session, or says that it does not hold the adapter that it announces."""
        return refusal.breaks_promise or (refusal.code == RefusalCode.UNKNOWN_ADAPTER and bool(self._model.adapter))

    def _note_evicted(self, peer: PeerId, retry_after_s: float, now_s: float) -> None:
        """The peer has freed the KV of a session. An honest one has to if others want it, so it is not banned. It
        counts as full, and has to prove itself anew. One that had not yet has taken a session and not served it.
        """
        records, is_new = self._records, not self._records.is_full(peer, now_s)  # the rows of a batch go together
        was_proven = records.standing.is_proven(peer, now_s)
        records.note_crowded(peer, now_s, retry_after_s)
        if is_new:
            self._trials.note_failed(peer)
            records.standing.note_failed(peer, now_s)
            if not was_proven:
                self._note_unkept(peer)

    def _note_unkept(self, peer: PeerId) -> None:
        """The peer does not do what it announces. `Reaching` counts those that were not reached."""
        if (group := self._group_of(peer)) is not None:
            self._try_others(group)
