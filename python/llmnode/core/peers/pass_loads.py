"""The passes that one client has at its peers, and the times that passes took there. Knows no clock: times are told.

A peer computes the passes of one client one after another. So a pass ends there after all passes that the client has
given to it, or is going to give to it. A peer's word is not asked again once it has answered a pass: what that took
counts. A pass that is late counts before its answer comes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from llmnode.core.peers.standing import new_tuple
from llmnode.core.route import HopCost
from llmnode.core.serving.pass_queue import BACKWARD_COST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span

LEAST_POSITIONS = 32
"""Fewer positions count as this number: they take nearly the same time."""
BELIEVED_TIMES = 2.0
"""A peer that has answered no pass counts at most this many times as fast as those that have."""
AT_FIRST = 2
"""A peer that has answered no pass has this many at once. It may be slow, or silent, whatever it says."""
BEHIND_UNKNOWN_S = 1e4
"""A pass waits behind those only if no other peer has the blocks: for each block it counts as this much later."""
KEPT = 16
"""The latest passes of a peer count."""
KEEPS_S = 600.0
"""A peer that has answered nothing for this long has to show its speed anew: it may be less busy now."""
PEERS = 256
"""A client remembers this many. Those that answered it longest ago are forgotten first."""


def pass_weight(positions: int, *, is_backward: bool) -> int:
    """The cost of a pass through one block, in positions of a forward."""
    return max(positions, LEAST_POSITIONS) * (BACKWARD_COST if is_backward else 1)


class Kind(IntEnum):
    """Says how much is known of the speed of a peer."""

    MEASURED = 0
    TRIED = 1
    """It has passes, and has answered none lately."""
    UNTRIED = 2


class Holder(NamedTuple):
    """A peer that may compute a pass."""

    peer: PeerId
    span: Span
    cost: HopCost
    """That of a token, as for a session."""
    undoubted: HopCost
    """The same without what suspicions and failures add to it."""


@dataclass(slots=True, eq=False)
class PassLoad:
    """One pass at a peer, or on its way there. `cost` is in positions times blocks of a forward."""

    peer: PeerId
    cost: int
    began_s: float | None = None
    """When it was sent; None while it waits for its turn."""
    is_over: bool = False


@dataclass(slots=True)
class _AtPeer:
    loads: list[PassLoad] = field(default_factory=list)
    """Those that have not ended, in the order in which the peer was chosen for them."""
    took: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """The cost of each pass that was answered, and the time that the peer spent on it."""
    answered_s: float = -math.inf

    def seen_s(self, now_s: float) -> float | None:
        """The time for each unit of cost, as it was lately. None if that is not known."""
        if not self.took or self.answered_s + KEEPS_S < now_s:
            return None
        return sum(took_s for _, took_s in self.took) / sum(cost for cost, _ in self.took) or None

    def least_s(self, now_s: float) -> float:
        """The time for each unit of cost if all that the peer has been sent were answered now, perhaps together."""
        sent = [(each.began_s, each.cost) for each in self.loads if each.began_s is not None]
        if not sent:
            return 0.0
        since_s = max(min(began_s for began_s, _ in sent), self.answered_s)
        return max(0.0, now_s - since_s) / sum(cost for _, cost in sent)


class PassLoads:
    """Those of one client."""

    def __init__(self) -> None:
        self._peers: dict[PeerId, _AtPeer] = {}

    def give(self, peer: PeerId, cost: int) -> PassLoad:
        """The peer was chosen for a pass, which is to be taken back when it is over."""
        load = PassLoad(peer, cost)
        self._peers.setdefault(peer, _AtPeer()).loads.append(load)
        return load

    def take_back(self, load: PassLoad) -> None:
        """The pass is over, or goes to another peer. This may be said again."""
        if load.is_over:
            return
        load.is_over = True
        at = self._peers[load.peer]
        at.loads.remove(load)
        if not at.loads and not at.took:
            del self._peers[load.peer]

    def kind(self, peer: PeerId, now_s: float) -> Kind:
        """Whether the peer has answered passes lately."""
        if (at := self._peers.get(peer)) is None:
            return Kind.UNTRIED
        if at.seen_s(now_s) is not None:
            return Kind.MEASURED
        return Kind.TRIED if at.loads else Kind.UNTRIED

    def note(self, peer: PeerId, cost: int, began_s: float, now_s: float) -> None:
        """The peer has answered a pass that was sent to it at `began_s`."""
        at = self._peers.pop(peer, None) or _AtPeer()
        at.took.append((cost, now_s - max(began_s, at.answered_s)))
        at.answered_s = now_s
        self._peers[peer] = at
        if len(self._peers) > PEERS:
            oldest = next((other for other, each in self._peers.items() if not each.loads), None)
            if oldest is not None:
                del self._peers[oldest]

    def costs(
        self,
        holders: Iterable[Holder],
        weight: int,
        now_s: float,
        without: PassLoad | None = None,
        *,
        has_none: bool = False,
    ) -> dict[PeerId, HopCost]:
        """The time of a pass of this `weight` for each block at each peer, and the time until it begins there.

        The pass `without` does not count: it would not stay where it is. If the client `has_none`, no pass does. A peer
        that has answered no pass counts as fast as for a session, next to those that have. After AT_FIRST passes,
        the next one there counts as very late.
        """
        known = [*holders]  # a look through the swarm has thousands
        mine, found = self._peers, [each.peer for each in known if each.peer in self._peers]
        seen_s = {peer: s for peer in found if (s := mine[peer].seen_s(now_s)) is not None}
        of_tokens = [seen_s[each.peer] / each.undoubted.block_s for each in known if each.peer in seen_s]
        for_token = median_low(of_tokens) if of_tokens else 1.0
        fastest_s = median_low(seen_s.values()) / BELIEVED_TIMES if seen_s else 0.0
        doubt_times = max(1.0, weight * for_token)
        costs = {}
        for peer, _, cost, undoubted in known:
            said_s, waiting, is_full = for_token * undoubted.block_s, 0, False
            unit_s = seen_s.get(peer, said_s if said_s > fastest_s else fastest_s)
            if peer in mine and (at := mine[peer]).loads:
                unit_s = max(unit_s, at.least_s(now_s))
                before = [] if has_none else [each.cost for each in at.loads if each is not without]
                waiting, is_full = sum(before), peer not in seen_s and len(before) >= AT_FIRST
            doubt_s = for_token * (cost.block_s - undoubted.block_s)  # it counts once: others have it too, perhaps
            hop_s = undoubted.hop_s + doubt_times * (cost.hop_s - undoubted.hop_s)
            block_s = weight * (unit_s + doubt_s) + (BEHIND_UNKNOWN_S if is_full else 0.0)
            costs[peer] = new_tuple(HopCost, (hop_s + waiting * unit_s, block_s, 0.0))
        return costs
