"""Sums over the leases of a server's KV, kept as these change: an OPEN or a step costs no look at all of them.

Only the shares (`kv_shares.py`) are worked out from all leases, when somebody has to leave for others.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, TypeVar

from llmnode.core.serving.kv_shares import KvShares

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.serving.kv_shares import KvLease

KeyT = TypeVar("KeyT", bound="Hashable")


class KvLedger:
    """All leases of `total` positions. The parts that count in a sum are changed within `changing` alone."""

    def __init__(self, total: int, policy: AdmissionPolicy) -> None:
        self._total = total
        self._policy = policy
        self.leases: dict[SessionId, KvLease] = {}
        """In the order in which they were added, as are those that wait."""
        self.waiting: dict[SessionId, KvLease] = {}
        self.inside: dict[SessionId, KvLease] = {}
        """Those that have KV, and do not leave."""
        self.free = total
        self.lacking = 0
        """The positions that sessions which have come in wait for."""
        self.since_us = 0
        """The sum of the times at which those `inside` came in, as integers: such a sum stays exact."""
        self.of_group: Counter[str] = Counter()
        """The positions that each group holds, without the leases that are leaving."""
        self.of_peer: Counter[tuple[str, PeerId]] = Counter()
        self.waiting_of_group: Counter[str] = Counter()
        self.waiting_of_client: Counter[PeerId] = Counter()
        self._growing: dict[SessionId, KvLease] = {}
        self._needed: Counter[int] = Counter()
        """How many wait for each number of positions."""
        self._held = self._later = self._added = 0
        self._shares: KvShares | None = None

    def add(self, lease: KvLease) -> None:
        """No other lease has the name of its session."""
        assert lease.session not in self.leases, "a server has one session of a name"
        self._added += 1
        lease.number = self._added
        self.leases[lease.session] = lease
        self._enter(lease)

    def remove(self, session: SessionId) -> KvLease | None:
        """The lease, if it was there."""
        if (lease := self.leases.pop(session, None)) is not None:
            self._count(lease, -1)
            for places in (self.waiting, self.inside, self._growing):
                places.pop(session, None)
        return lease

    @contextmanager
    def changing(self, lease: KvLease) -> Iterator[None]:
        """One of `leases` is changed meanwhile."""
        self._count(lease, -1)
        try:
            yield
        finally:
            self._enter(lease)

    @property
    def growing(self) -> list[KvLease]:
        """Those `inside` that need more than they have, the oldest first."""
        return sorted(self._growing.values(), key=lambda each: each.number)

    @property
    def kept(self) -> int:
        """The positions that newcomers leave for sessions that grow."""
        return self.lacking + self._reserve

    @property
    def coming(self) -> int:
        """The positions for newcomers that are free, and those of sessions that leave."""
        return self._total - self._held - self.kept

    @property
    def missing(self) -> int:
        """The positions that sessions which grow need, beside those that are free or of sessions that leave."""
        return self._held + self.lacking - self._total

    @property
    def least(self) -> float:
        """The fewest positions that a session waits for."""
        return min(self._needed, default=inf)

    @property
    def shares(self) -> KvShares:
        if self._shares is None:
            self._shares = self.shares_with()
        return self._shares

    def shares_with(self, *more: KvLease) -> KvShares:
        """The shares of all leases, and of `more` that ask."""
        # Nobody has a share in the reserve: else one group could have all but that, and be within its share.
        return KvShares([*self.leases.values(), *more], self._total - self._reserve, self._policy)

    @property
    def _reserve(self) -> int:
        return min(self._later, int(self._policy.growth_share * self._total))

    def _enter(self, lease: KvLease) -> None:
        """Count it, in its places."""
        self._count(lease, 1)
        is_inside = lease.is_inside and not lease.is_leaving
        for places, belongs in (
            (self.waiting, not lease.is_inside),
            (self.inside, is_inside),
            (self._growing, is_inside and lease.growing > 0),
        ):
            if belongs:
                places[lease.session] = lease
            else:
                places.pop(lease.session, None)

    def _count(self, lease: KvLease, sign: int) -> None:
        self._shares = None
        held, claim = sign * lease.positions, lease.claim
        self.free -= held
        if not lease.is_leaving:
            _add(self.of_group, claim.group, held)
            _add(self.of_peer, lease.peer, held)
        if not lease.is_inside:
            _add(self._needed, lease.needed, sign)
            _add(self.waiting_of_group, claim.group, sign)
            _add(self.waiting_of_client, claim.client, sign)
        elif not lease.is_leaving:
            self._held += held
            self._later += sign * lease.later
            self.lacking += sign * lease.growing
            self.since_us += sign * in_us(lease.since_s)


def in_us(time_s: float) -> int:
    """A time in whole microseconds."""
    return round(1e6 * time_s)


def _add(counts: Counter[KeyT], key: KeyT, amount: int) -> None:
    """Nothing is left of a count that is over."""
    if amount:
        counts[key] += amount
        if not counts[key]:
            del counts[key]
