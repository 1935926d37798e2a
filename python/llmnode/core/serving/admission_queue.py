"""Decides which sessions get KV memory on a server, in which order they wait for it, and which ones leave when others
wait. Knows no clock: it is told the time.

Among the waiting sessions, higher priorities come first, then the address groups and the peers that hold the least,
then the oldest. A session that fits does not wait for one that does not fit. But after some times of being passed
over, memory is kept free until the large one fits. `kv_shares.py` chooses the sessions that leave.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.ids import NO_SESSION
from llmnode.core.serving.kv_shares import KvLease, KvShares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.serving.kv_shares import KvClaim


class AdmissionQueue:
    """A server's KV memory of `positions`. A session is put in line with `add`, comes in with `admit`, may have to
    leave by `choose_moves`, and goes with `remove`.
    """

    def __init__(self, positions: int, policy: AdmissionPolicy) -> None:
        self.positions = positions
        self._policy = policy
        self._leases: dict[SessionId, KvLease] = {}
        self._stays_s: deque[float] = deque(maxlen=policy.stays_kept)

    @property
    def free(self) -> int:
        return self.positions - self._held

    @property
    def line(self) -> int:
        """How many wait to come in."""
        return len(self._newcomers())

    def place_for(self, claim: KvClaim) -> tuple[bool, SessionId | None]:
        """Whether one more session of this peer may wait, and the one that makes way for it, if one has to.

        That is the newest of the group with the most that wait, if it has more than the peer's own.
        """
        line = self._newcomers()
        if sum(each.claim.client == claim.client for each in line) >= self._policy.line_per_client:
            return False, None
        if len(line) < self._policy.line:
            return True, None
        waiting = Counter(each.group for each in line)
        group, most = max(waiting.items(), key=lambda each: each[1])
        if most <= waiting[claim.group] + 1:
            return False, None
        return True, next(each.session for each in reversed(line) if each.group == group)

    def add(self, session: SessionId, claim: KvClaim, now_s: float) -> None:
        """Put it in line. With a claim to more positions than there are, it would wait for ever."""
        assert claim.positions <= self.positions
        self._leases[session] = KvLease(session, claim, now_s)

    def use(self, session: SessionId, now_s: float, *, ends: bool) -> None:
        """It begins to be used, or ends to be. An unknown one does nothing."""
        if (lease := self._leases.get(session)) is not None:
            lease.used_s = now_s if ends else inf

    def admit(self, now_s: float) -> Sequence[SessionId]:
        """Those that come in now, in order."""
        admitted: list[SessionId] = []
        while (lease := self._next(now_s)) is not None:
            lease.is_inside, lease.since_s, lease.used_s = True, now_s, now_s
            admitted.append(lease.session)
        return admitted

    def choose_moves(self, now_s: float) -> Sequence[SessionId]:
        """The sessions that have to leave since others wait, each once. They hold their KV until they are removed."""
        chosen: list[SessionId] = []
        coming, shares = self._coming, self._shares()
        for lease in self._in_order(now_s):
            if lease.claim.positions > coming:
                moves = shares.choose_moves(lease, lease.claim.positions - coming, now_s)
                if not moves:
                    continue
                for each in moves:
                    each.is_leaving = True
                    coming += each.positions
                    chosen.append(each.session)
                shares = self._shares()
            coming -= lease.claim.positions
        return chosen

    def remove(self, session: SessionId, now_s: float) -> None:
        """It has ended, or waits no longer. An unknown one does nothing."""
        left = self._leases.pop(session, None)
        if left is not None and left.is_inside:
            self._stays_s.append(now_s - left.since_s)

    def retry_after_s(self, claim: KvClaim, now_s: float) -> float:
        """The time until there may be space for such a session, after those whose turn comes before.

        That is when sessions have ended, if they stay as long as they have till now, or when some may be moved.
        """
        policy, held = self._policy, self._held
        asking = KvLease(NO_SESSION, claim, now_s)
        order = self._in_order(now_s, asking)
        missing = sum(each.claim.positions for each in order[: order.index(asking) + 1]) - self._coming
        # Those that are still here count too, or only short ones would: the likeliest mean of an exponential stay.
        here_s = sum(now_s - each.since_s for each in self._inside())
        stay_s = (sum(self._stays_s) + here_s) / max(1, len(self._stays_s))
        ends_s = stay_s * missing / held if held else 0.0
        moves_s = self._moves_in_s(asking, missing, now_s) if missing > 0 else 0.0
        if self._stays_s or moves_s == inf:  # else nothing is known of stays
            moves_s = min(moves_s, ends_s)
        return max(policy.least_retry_s, min(moves_s, policy.longest_retry_s))

    def _moves_in_s(self, lease: KvLease, wanted: int, now_s: float) -> float:
        """How long it takes until some may be moved for this lease, if nobody uses them till then."""
        policy, shares = self._policy, self._shares(lease)
        times = {now_s, *(each.used_s + policy.idle_s for each in self._inside())}
        times |= {each.since_s + policy.keeps_s for each in self._inside()}
        ahead = sorted(each for each in times if now_s <= each <= now_s + policy.longest_retry_s)
        index = bisect_left(ahead, True, key=lambda at_s: bool(shares.choose_moves(lease, wanted, at_s)))
        return ahead[index] - now_s if index < len(ahead) else inf

    def _next(self, now_s: float) -> KvLease | None:
        """The next session that comes in. Those before it have been passed over once more."""
        passed: list[KvLease] = []
        for lease in self._in_order(now_s):
            if lease.claim.positions <= self.free:
                for other in passed:
                    other.passed_over += 1
                return lease
            if lease.passed_over >= self._policy.passed_over:
                return None
            passed.append(lease)
        return None

    def _in_order(self, now_s: float, *more: KvLease) -> list[KvLease]:
        """Those that wait, in the order of their turns, and `more` among them."""
        if not (waiting := [*self._newcomers(), *more]):
            return []
        shares = self._shares()

        def turn(lease: KvLease) -> tuple[int, int, int]:
            aged = int((now_s - lease.since_s) / self._policy.ageing_s)
            return max(0, lease.claim.priority - aged), shares.of_group[lease.group], shares.of_peer[lease.peer]

        return sorted(waiting, key=turn)

    def _shares(self, *more: KvLease) -> KvShares:
        return KvShares([*self._leases.values(), *more], self.positions, self._policy)

    @property
    def _held(self) -> int:
        return sum(each.positions for each in self._leases.values())

    @property
    def _coming(self) -> int:
        """The positions that are free, and those of sessions that leave."""
        return self.positions - sum(each.positions for each in self._inside())

    def _inside(self) -> list[KvLease]:
        """Those that have KV, and do not leave."""
        return [each for each in self._leases.values() if each.is_inside and not each.is_leaving]

    def _newcomers(self) -> list[KvLease]:
        return [each for each in self._leases.values() if not each.is_inside]
