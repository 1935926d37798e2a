"""Decides which sessions have to give up their KV when others wait for it. Knows no clock: it is told the time.

KV is shared by address group, and within a group by peer, since identities are free. A group that wants less than an
equal share gets that, and the others share the rest (max-min fairness). Sessions go from holders above their share,
for those that stay within theirs. So what was moved cannot move others to come back, unless these are idle. Idle
sessions go first, and of these the unused ones, since nothing is lost. A session in use goes only if its holder still
has as much as the one that waits then has, and not soon after it came in. If nobody else may go, idle sessions of the
waiting one's own peer do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.priority import Priority


@dataclass(frozen=True, slots=True)
class KvClaim:
    """A session's claim to KV: it may have this number of positions, of which `at_once` come as soon as it is open."""

    client: PeerId
    group: str
    """The client's address group."""
    priority: Priority
    positions: int
    at_once: int = 0


@dataclass(slots=True, eq=False)
class KvLease:
    """The KV of one session, which has some if it `is_inside`, and else waits for its first."""

    session: SessionId
    claim: KvClaim
    since_s: float
    """When it began to wait; once it has come in, when that was."""
    is_inside: bool = False
    used_s: float = inf
    """When it was used last; infinite while it is in use."""
    has_computed: bool = False
    is_leaving: bool = False
    passed_over: int = 0
    later: int = 0
    """The positions of its claim that it does not need yet."""
    growing: int = 0
    """The positions that it needs beside those that it has, if it `is_inside`."""
    grows_to: int = 0
    """The position that it has to reach now."""
    copied: int = 0
    """It became a copy of another session up to this position."""
    is_moved: bool = False
    """It leaves since others need its KV."""
    number: int = 0
    """Its place in the order in which sessions were queued."""

    @property
    def positions(self) -> int:
        """The positions that it has KV for."""
        return self.claim.positions - self.later - self.growing if self.is_inside else 0

    @property
    def needed(self) -> int:
        """The positions that it needs now, and has not."""
        return self.growing if self.is_inside else self.claim.positions - self.later

    def idle_from_s(self, policy: AdmissionPolicy) -> float:
        """When it is idle, if it is not used till then."""
        return self.used_s + (policy.idle_s if self.has_computed else policy.unused_s)

    @property
    def group(self) -> str:
        return self.claim.group

    @property
    def peer(self) -> tuple[str, PeerId]:
        return self.claim.group, self.claim.client


def fair_share(wanted: Iterable[int], total: int) -> float:
    """The share that each gets of `total`, or less if it wants less. Infinite if there is enough for all."""
    amounts = sorted(wanted)
    for number, amount in enumerate(amounts):
        share = total / (len(amounts) - number)
        if amount > share:
            return share
        total -= amount
    return inf


def _without_useless(chosen: Sequence[KvLease], missing: int) -> list[KvLease]:
    """Those that have to go, of more than enough: a small one may be of no use beside a large one."""
    kept = list(chosen)
    for each in chosen:
        if each.positions <= -missing:
            kept.remove(each)
            missing += each.positions
    return kept


@dataclass(frozen=True, slots=True)
class _Held:
    """Positions by group, and by peer."""

    of_group: Counter[str]
    of_peer: Counter[tuple[str, PeerId]]


class KvShares:
    """The shares of `total` positions among those that hold or want some. A lease that is leaving holds nothing."""

    def __init__(self, leases: Iterable[KvLease], total: int, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self._leases = [each for each in leases if not each.is_leaving]
        self.of_group: Counter[str] = Counter()
        """The positions that each group holds."""
        self.of_peer: Counter[tuple[str, PeerId]] = Counter()
        self._inside_of: defaultdict[tuple[str, PeerId], list[KvLease]] = defaultdict(list)
        wanted: Counter[str] = Counter()
        wanted_within: defaultdict[str, Counter[tuple[str, PeerId]]] = defaultdict(Counter)
        for each in self._leases:
            self.of_group[each.group] += each.positions
            self.of_peer[each.peer] += each.positions
            wanted[each.group] += each.positions + each.needed
            wanted_within[each.group][each.peer] += each.positions + each.needed
            if each.is_inside:
                self._inside_of[each.peer].append(each)
        self.share = fair_share(wanted.values(), total)
        """The share of a group."""
        self._within = {
            group: fair_share(peers.values(), int(min(self.share, wanted[group])))
            for group, peers in wanted_within.items()
        }

    @property
    def inside(self) -> list[KvLease]:
        """Those that have KV, and do not leave."""
        return [each for each in self._leases if each.is_inside]

    def is_entitled(self, lease: KvLease) -> tuple[bool, bool]:
        """Whether its group, and its peer within the group, stay within their shares with what the lease needs.

        A peer that has nothing may always have `first_positions`.
        """
        return (
            self._is_within(self.of_group[lease.group], lease.needed, self.share),
            self._is_within(self.of_peer[lease.peer], lease.needed, self.share_within(lease.group)),
        )

    def share_within(self, group: str) -> float:
        """The share of a peer of this group."""
        return self._within.get(group, inf)

    def movable(self, now_s: float) -> dict[tuple[str, PeerId], list[KvLease]]:
        """By peer, the sessions that may have to leave for anybody. Those that go first come last."""
        of_peers: defaultdict[tuple[str, PeerId], list[KvLease]] = defaultdict(list)
        for each in self._leases:
            is_above = each.is_inside and self.of_peer[each.peer] > self.share_within(each.group)
            if is_above and not self.is_kept(each, now_s):
                of_peers[each.peer].append(each)
        for own in of_peers.values():
            own.sort(key=lambda each: (self.is_unused(each, now_s), self.is_idle(each, now_s), -each.used_s))
        return of_peers

    def choose_moves(
        self,
        lease: KvLease,
        wanted: int,
        now_s: float,
        movable: Mapping[tuple[str, PeerId], Sequence[KvLease]] | None = None,
    ) -> Sequence[KvLease]:
        """The leases that go, so that `lease`, which waits, gets `wanted` more than is free.

        There are none if that is not possible, or if it is not fair: with it, its peer would have more than its share,
        or its group would have it from another group. But idle ones of its own peer may always go for it. `movable` are
        those of now, if the caller has them.
        """
        return self._of_others(lease, wanted, now_s, movable) or self._own_idle(lease, wanted, now_s)

    def _own_idle(self, lease: KvLease, wanted: int, now_s: float) -> Sequence[KvLease]:
        """The leases of its own peer that go for it, the longest idle first; none if all idle ones are too small.

        None goes for one of a lower priority.
        """
        chosen: list[KvLease] = []
        for each in sorted(self._inside_of[lease.peer], key=lambda each: each.used_s):
            if wanted <= 0 or now_s < each.used_s + self._policy.own_idle_s:
                break
            if each.claim.priority >= lease.claim.priority:
                chosen.append(each)
                wanted -= each.positions
        return _without_useless(chosen, wanted) if wanted <= 0 else []

    def _of_others(
        self,
        lease: KvLease,
        wanted: int,
        now_s: float,
        movable: Mapping[tuple[str, PeerId], Sequence[KvLease]] | None,
    ) -> Sequence[KvLease]:
        of_all, of_peer = self.is_entitled(lease)
        if not of_peer:
            return []
        held = _Held(Counter(self.of_group), Counter(self.of_peer))
        # Within a peer the order never changes, and one that does not give way now does not later, when less is held.
        of_peers = {
            peer: list(own)
            for peer, own in (self.movable(now_s) if movable is None else movable).items()
            if peer != lease.peer and (of_all or peer[0] == lease.group)
        }
        chosen: list[KvLease] = []
        missing = wanted
        while missing > 0:
            ranks: list[tuple[tuple[float, ...], list[KvLease]]] = []
            for own in of_peers.values():
                while own and (rank := self._rank(own[-1], held, lease, now_s)) is None:
                    own.pop()
                if own and rank is not None:
                    ranks.append((rank, own))
            if not ranks:
                return []
            best = max(ranks, key=lambda each: each[0])[1].pop()
            chosen.append(best)
            missing -= best.positions
            held.of_group[best.group] -= best.positions
            held.of_peer[best.peer] -= best.positions
        return _without_useless(chosen, missing)

    def _rank(self, each: KvLease, held: _Held, lease: KvLease, now_s: float) -> tuple[float, ...] | None:
        """The session with the highest rank gives way to `lease` first. None if it does not give way."""
        of_peer = held.of_peer[each.peer]
        above = of_peer - self.share_within(each.group)
        left, gets = of_peer - each.positions, held.of_peer[lease.peer] + lease.needed
        if each.group != lease.group:
            above = min(above, held.of_group[each.group] - self.share)
            left, gets = held.of_group[each.group] - each.positions, held.of_group[lease.group] + lease.needed
        if above <= 0:
            return None
        is_idle = self.is_idle(each, now_s)
        if self.is_kept(each, now_s) or (not is_idle and left < gets):
            return None
        return self.is_unused(each, now_s), is_idle, held.of_group[each.group], of_peer, -each.used_s

    def is_idle(self, each: KvLease, now_s: float) -> bool:
        """Whether it was not used for `AdmissionPolicy.idle_s`, or at all for `unused_s`."""
        return now_s >= each.idle_from_s(self._policy)

    def is_unused(self, each: KvLease, now_s: float) -> bool:
        """Whether it is idle, and has computed nothing."""
        return not each.has_computed and self.is_idle(each, now_s)

    def is_kept(self, each: KvLease, now_s: float) -> bool:
        """Whether it is in use, and has had its KV for less than `AdmissionPolicy.keeps_s`."""
        return now_s < each.since_s + self._policy.keeps_s and not self.is_idle(each, now_s)

    def _is_within(self, held: int, wanted: int, share: float) -> bool:
        return held + wanted <= share or (not held and wanted <= self._policy.first_positions)
