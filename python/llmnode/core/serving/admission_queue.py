"""Decides which sessions get KV memory on a server, in which order they wait for it, and which ones leave when others
wait. Knows no clock: it is told the time.

Among the waiting sessions, higher priorities come first, then the address groups and the peers that hold the least,
then the oldest. A session that fits does not wait for one that does not fit. But after some times of being passed
over, memory is kept free until the large one fits. `kv_shares.py` chooses the sessions that leave.

A session comes in with KV for its first positions, and grows in pieces. Growth comes before newcomers, which leave some
memory free for it. `kv_growth.py` chooses the sessions that leave for growth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING

from llmnode.core.ids import NO_SESSION
from llmnode.core.rates import Rates
from llmnode.core.serving.kv_growth import choose_leaving
from llmnode.core.serving.kv_ledger import KvLedger, in_us
from llmnode.core.serving.kv_shares import KvLease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.serving.kv_shares import KvClaim


class AdmissionQueue:
    """A server's KV memory of `positions`. A session is queued with `add`, comes in with `admit`, grows with `grow` and
    `admit`, may have to leave by `choose_moves` and `choose_leaving`, and goes with `remove`.
    """

    def __init__(self, positions: int, policy: AdmissionPolicy, page: int = 1) -> None:
        """KV is given in multiples of `page` positions."""
        self.positions = positions
        self._policy = policy
        self._page = page
        self._ledger = KvLedger(positions, policy)
        self._stays: deque[tuple[float, bool]] = deque(maxlen=policy.stays_kept)
        """For how long the latest sessions had KV, and whether they ended of themselves."""
        self._first_tried = 0
        """Those that wait before this place in the queue were tried at the last look."""
        self._forecasts = Rates(policy.forecasts, policy.forecasts_per_s)
        self._forecasts_of_group = Rates(policy.forecasts / 4, policy.forecasts_per_s / 4)

    @property
    def free(self) -> int:
        return self._ledger.free

    @property
    def kept(self) -> int:
        """The positions that newcomers leave for sessions that grow."""
        return self._ledger.kept

    @property
    def waiting(self) -> int:
        """How many wait to come in."""
        return len(self._ledger.waiting)

    def place_for(self, claim: KvClaim) -> tuple[bool, SessionId | None]:
        """Whether one more session of this peer may wait, and the one that makes way for it, if one has to.

        That is the newest of the group with the most that wait, if it has more than the peer's own.
        """
        ledger, policy = self._ledger, self._policy
        if ledger.waiting_of_client[claim.client] >= policy.most_waiting_per_client:
            return False, None
        if len(ledger.waiting) < policy.most_waiting:
            return True, None
        if max(ledger.waiting_of_group.values()) <= ledger.waiting_of_group[claim.group] + 1:
            return False, None
        of_group = Counter(each.group for each in ledger.waiting.values())
        group = max(of_group, key=lambda each: of_group[each])  # of several, the one whose session waits longest
        return True, next(each.session for each in reversed(ledger.waiting.values()) if each.group == group)

    def add(self, session: SessionId, claim: KvClaim, now_s: float) -> None:
        """Queue it. With a claim to more positions than there are, it would wait for ever."""
        self._ledger.add(self._newcomer(session, claim, now_s))

    def _newcomer(self, session: SessionId, claim: KvClaim, now_s: float) -> KvLease:
        claim = replace(claim, positions=self.in_pages(claim.positions))
        return KvLease(session, claim, now_s, later=claim.positions - self.first(claim))

    def first(self, claim: KvClaim) -> int:
        """The positions that such a session comes in with."""
        return self.in_pages(min(claim.positions, claim.at_once + self._policy.first_positions))

    def in_pages(self, positions: int) -> int:
        """The positions of whole pages for that many."""
        return ceil(positions / self._page) * self._page

    def held(self, session: SessionId) -> int:
        """The positions that a session has KV for. An unknown one has none."""
        lease = self._ledger.leases.get(session)
        return 0 if lease is None else lease.positions

    def grow(self, session: SessionId, positions: int) -> None:
        """A session that has come in needs KV for `positions` in all. It gets it with `admit`, and of the piece
        around it the part that is free.
        """
        lease, piece = self._ledger.leases[session], self._policy.first_positions
        least = self.in_pages(positions) - lease.positions
        wanted = min(lease.later, self.in_pages(ceil(positions / piece) * piece) - lease.positions)
        assert 0 < least <= lease.later, "it has that, or has claimed less"
        unasked = (self.free - self._ledger.lacking) // self._page * self._page
        with self._ledger.changing(lease):
            lease.growing, lease.grows_to = max(least, min(wanted, unasked)), positions
            lease.later -= lease.growing

    def copy(self, session: SessionId, positions: int) -> None:
        """A session that has come in becomes a copy of another one up to this position. An unknown one does nothing."""
        if (lease := self._ledger.leases.get(session)) is not None:
            lease.copied = positions

    def give_up(self, session: SessionId) -> None:
        """It grows no more than it has. An unknown one does nothing."""
        if (lease := self._ledger.leases.get(session)) is not None:
            with self._ledger.changing(lease):
                lease.later, lease.growing = lease.later + lease.growing, 0

    def choose_leaving(self, session: SessionId, now_s: float) -> Sequence[SessionId]:
        """The sessions that have to leave since this one grows, each once; perhaps it alone. They hold their KV until
        they are removed.
        """
        ledger, lease = self._ledger, self._ledger.leases[session]
        spares = lease.copied > 0 and lease.grows_to <= lease.copied + self._policy.first_positions
        missing = ledger.missing
        chosen = choose_leaving(ledger.shares, lease, missing, now_s, spares=spares) if missing > 0 else ()
        for each in chosen:
            self._move(each)
        return [each.session for each in chosen]

    def end(self, session: SessionId, *, is_moved: bool = False) -> None:
        """It leaves, of itself unless it `is_moved`, and holds its KV until it is removed.

        An unknown one does nothing.
        """
        if (lease := self._ledger.leases.get(session)) is not None:
            with self._ledger.changing(lease):
                lease.is_leaving, lease.is_moved = True, lease.is_moved or is_moved

    def use(self, session: SessionId, now_s: float, *, ends: bool) -> None:
        """It begins to be used, or ends to be. An unknown one does nothing."""
        if (lease := self._ledger.leases.get(session)) is not None:
            lease.used_s = now_s if ends else inf
            lease.has_computed |= ends

    def admit(self, now_s: float) -> Sequence[SessionId]:
        """Those that come in or grow now, in order."""
        admitted: list[SessionId] = []
        for growing in self._ledger.growing:
            if growing.growing <= self.free:
                with self._ledger.changing(growing):
                    growing.growing = 0
                admitted.append(growing.session)
        while (lease := self._next(now_s)) is not None:
            with self._ledger.changing(lease):
                lease.is_inside, lease.since_s, lease.used_s = True, now_s, now_s
            admitted.append(lease.session)
        return admitted

    def choose_moves(self, now_s: float) -> Sequence[SessionId]:
        """The sessions that have to leave since others wait, each once. They hold their KV until they are removed."""
        chosen: list[SessionId] = []
        coming, shares = self._ledger.coming, self._ledger.shares
        movable = shares.movable(now_s)
        failed: dict[tuple[str, PeerId], int] = {}
        tried: list[int] = []
        for number, lease in enumerate(self._in_order(now_s)):
            positions = lease.needed
            if positions > coming:
                is_due = number >= self._first_tried and len(tried) < self._policy.tried_per_look
                if not is_due or positions >= failed.get(lease.peer, inf):
                    continue
                tried.append(number)
                if not (moves := shares.choose_moves(lease, positions - coming, now_s, movable)):
                    failed[lease.peer] = positions
                    continue
                for each in moves:
                    self._move(each)
                    coming += each.positions
                    chosen.append(each.session)
                shares = self._ledger.shares
                movable = shares.movable(now_s)
            coming -= positions
        self._first_tried = tried[-1] + 1 if len(tried) == self._policy.tried_per_look else 0
        return chosen

    def _move(self, lease: KvLease) -> None:
        """It has to leave for others."""
        with self._ledger.changing(lease):
            lease.is_leaving = lease.is_moved = True

    def remove(self, session: SessionId, now_s: float) -> None:
        """It has ended, or waits no longer. An unknown one does nothing."""
        if (left := self._ledger.remove(session)) is not None and left.is_inside:
            self._stays.append((now_s - left.since_s, not left.is_moved))

    def retry_after_s(self, claim: KvClaim, now_s: float, *, forecasts: bool = True) -> float:
        """The time until there may be space for such a session, after those whose turn comes before.

        That is when sessions have ended, if they stay as long as they have till now, or when some may be moved, if it
        `forecasts` that.
        """
        policy, ledger = self._policy, self._ledger
        asking = self._newcomer(NO_SESSION, claim, now_s)
        turn = self._turn(asking, now_s)
        before = sum(each.needed for each in ledger.waiting.values() if self._turn(each, now_s) <= turn)
        missing, held = asking.needed + before - ledger.coming, self.positions - ledger.free
        # The time of those that are still here, or were moved, counts too: this is the likeliest mean of an exponential
        # stay. Otherwise only short stays would count.
        here_s = (len(ledger.inside) * in_us(now_s) - ledger.since_us) / 1e6
        ended = sum(itself for _, itself in self._stays)
        stay_s = (sum(stay_s for stay_s, _ in self._stays) + here_s) / max(1, ended)
        ends_s = stay_s * missing / held if held else 0.0
        moves_s = 0.0 if missing <= 0 else self._moves_in_s(asking, missing, now_s) if forecasts else inf
        if ended or moves_s == inf:  # else nothing is known of stays
            moves_s = min(moves_s, ends_s)
        return max(policy.least_retry_s, min(moves_s, policy.longest_retry_s))

    def _moves_in_s(self, lease: KvLease, wanted: int, now_s: float) -> float:
        """How long it takes until some may be moved for this lease, if nobody uses them till then.

        Infinite if they may not, and if this was worked out too often lately: it is costly.
        """
        if not self._forecasts_of_group.take(lease.group, now_s) or not self._forecasts.take("all", now_s):
            return inf
        policy, inside, shares = self._policy, self._ledger.inside.values(), self._ledger.shares_with(lease)
        times = {now_s, *(each.idle_from_s(policy) for each in inside)}
        times |= {each.since_s + policy.keeps_s for each in inside}
        times |= {each.used_s + policy.own_idle_s for each in inside if each.peer == lease.peer}
        until_s, every_s = now_s + policy.longest_retry_s, policy.least_retry_s  # more exactly it need not be
        ahead = sorted({every_s * ceil((each - now_s) / every_s) for each in times if now_s <= each <= until_s})
        index = bisect_left(ahead, True, key=lambda in_s: bool(shares.choose_moves(lease, wanted, now_s + in_s)))
        return ahead[index] if index < len(ahead) else inf

    def _next(self, now_s: float) -> KvLease | None:
        """The next session that comes in. Those before it have been passed over once more."""
        free = self.free - self._ledger.kept
        if self._ledger.least > free:
            return None
        passed: list[KvLease] = []
        for lease in self._in_order(now_s):
            if lease.needed <= free:
                for other in passed:
                    other.passed_over += 1
                return lease
            if lease.passed_over >= self._policy.passed_over:
                return None
            passed.append(lease)
        return None

    def _in_order(self, now_s: float) -> list[KvLease]:
        """Those that wait, in the order of their turns."""
        return sorted(self._ledger.waiting.values(), key=lambda lease: self._turn(lease, now_s))

    def _turn(self, lease: KvLease, now_s: float) -> tuple[int, int, int]:
        """A lower one comes first."""
        aged, ledger = int((now_s - lease.since_s) / self._policy.ageing_s), self._ledger
        return max(0, lease.claim.priority - aged), ledger.of_group[lease.group], ledger.of_peer[lease.peer]
