"""Sums over all leases of a server's KV, worked out anew from each of them, and the rules of the queue."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.serving.kv_shares import KvShares

if TYPE_CHECKING:
    from llmnode.core.ids import SessionId
    from llmnode.core.serving.admission_queue import AdmissionQueue
    from llmnode.core.serving.kv_shares import KvClaim


def check_ledger(queue: AdmissionQueue) -> None:
    """The queue keeps the sums that are worked out anew, whatever has changed."""
    kept, policy, positions = queue._ledger, queue._policy, queue.positions
    leases = list(kept.leases.values())
    waiting = [each for each in leases if not each.is_inside]
    inside = [each for each in leases if each.is_inside and not each.is_leaving]
    growing = [each for each in inside if each.growing]
    held, lacking = sum(each.positions for each in inside), sum(each.growing for each in growing)
    reserve = min(sum(each.later for each in inside), int(policy.growth_share * positions))
    assert list(kept.waiting.values()) == waiting
    assert sorted(kept.inside) == sorted(each.session for each in inside)
    assert kept.growing == growing
    assert kept.free == positions - sum(each.positions for each in leases)
    assert kept.lacking == lacking
    assert kept.kept == lacking + reserve
    assert kept.coming == positions - held - lacking - reserve
    assert kept.missing == held + lacking - positions
    assert kept.since_us == sum(round(1e6 * each.since_s) for each in inside)
    assert kept.least == min((each.needed for each in waiting), default=inf)
    assert kept.waiting_of_group == Counter(each.group for each in waiting)
    assert kept.waiting_of_client == Counter(each.claim.client for each in waiting)
    shares = KvShares(leases, positions - reserve, policy)
    assert kept.of_group == shares.of_group == kept.shares.of_group
    assert kept.of_peer == shares.of_peer == kept.shares.of_peer
    assert kept.shares.share == shares.share
    assert all(kept.shares.share_within(group) == shares.share_within(group) for group in shares.of_group)
    for counts in (kept.of_group, kept.of_peer, kept.waiting_of_group, kept.waiting_of_client, kept._needed):
        assert all(counts.values()), "nothing is left of a count that is over"


def plain_place_for(queue: AdmissionQueue, claim: KvClaim) -> tuple[bool, SessionId | None]:
    """`AdmissionQueue.place_for`, by a look at all that wait."""
    policy, waiting = queue._policy, [each for each in queue._ledger.leases.values() if not each.is_inside]
    if sum(each.claim.client == claim.client for each in waiting) >= policy.most_waiting_per_client:
        return False, None
    if len(waiting) < policy.most_waiting:
        return True, None
    of_group = Counter(each.group for each in waiting)
    group, most = max(of_group.items(), key=lambda each: each[1])
    if most <= of_group[claim.group] + 1:
        return False, None
    return True, next(each.session for each in reversed(waiting) if each.group == group)
