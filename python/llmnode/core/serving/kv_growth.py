"""Decides which sessions leave when one of them needs more KV than is free. Knows no clock: it is told the time.

Growth waits for no session that may stay: sessions that hold KV and wait for more could wait for each other for ever.
A session that grows within its holder's share has sessions leave whose holders are above theirs. Beyond its holder's
share it has younger ones leave: those of its holder, and those of other holders above their share that are not less
than half as large. Otherwise it leaves itself. So nobody within a share pays for others, and the oldest of the sessions
above it go on. Those that left come back by a replay, as preempted requests of vLLM do (Kwon et al. 2023, section 4.5).

A copy (FORK) costs its client nothing, and the replay of a session that left costs a prefill. So until a copy has
computed a piece of its own, sessions of others in use are kept from it, as they are from newcomers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.serving.kv_shares import KvLease, KvShares

LEAST_PART = 2
"""Beyond its share, a session has others leave only of a holder that has at least this part of its own holder's KV."""


def choose_leaving(shares: KvShares, lease: KvLease, missing: int, now_s: float, *, spares: bool) -> Sequence[KvLease]:
    """The leases that go, so that `lease`, which has KV, gets `missing` positions more than are free.

    It may be this lease alone. If it `spares` them, sessions of others that are kept (`KvShares.is_kept`) stay.
    """
    of_peer = shares.is_entitled(lease)[1]
    groups, peers = Counter(shares.of_group), Counter(shares.of_peer)
    group_gets, peer_gets = groups[lease.group] + lease.needed, peers[lease.peer] + lease.needed

    def goes(each: KvLease) -> bool:
        """Whether it has to, now that those that are chosen have gone."""
        is_younger = each.since_s > lease.since_s or shares.is_idle(each, now_s)
        if each.peer == lease.peer:
            return is_younger
        if spares and shares.is_kept(each, now_s):
            return False
        if peers[each.peer] <= shares.share_within(each.group):
            return False
        if each.group == lease.group:
            return of_peer or (is_younger and LEAST_PART * peers[each.peer] >= peer_gets)
        if groups[each.group] <= shares.share:
            return False
        of_all = of_peer and groups[lease.group] + lease.needed <= shares.share
        return of_all or (is_younger and LEAST_PART * groups[each.group] >= group_gets)

    def rank(each: KvLease) -> tuple[bool, bool, bool, float]:
        is_used, is_busy = not shares.is_unused(each, now_s), not shares.is_idle(each, now_s)
        return is_used, is_busy, of_peer and each.peer == lease.peer, -each.since_s

    chosen: dict[int, KvLease] = {}
    others = sorted((each for each in shares.inside if each is not lease), key=rank)
    for each in [*others, *others]:  # its group may be within its share when others of it have gone
        if missing > 0 and id(each) not in chosen and goes(each):
            chosen[id(each)] = each
            missing -= each.positions
            groups[each.group] -= each.positions
            peers[each.peer] -= each.positions
    if missing > 0:
        return [lease]
    for each in list(chosen.values()):  # a small one may be of no use beside a large one
        if each.positions <= -missing:
            del chosen[id(each)]
            missing += each.positions
    return list(chosen.values())
