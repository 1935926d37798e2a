"""The announcements that nodes of a simulated swarm have heard. Many nodes share a view, and the plan for it.

News of one server changes what is believed of few others. So the servers and the sums of their speeds are kept, and not
built anew: `claims.believed` and `servers.block_speeds` are the slow twins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

from llmnode.core.placement.claims import believed_of, usual_speed
from llmnode.core.placement.known_servers import KnownServers

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
    from llmnode.core.placement.servers import PlacedServer

UNIT = 2.0**-40
"""Tokens a second. Speeds are summed in whole numbers of this, so that a speed which is taken away leaves nothing."""


class SharedView:
    """The announcements that some of the nodes have heard of, and what follows from them, until the next change."""

    def __init__(self, blocks: int, policy: RebalancePolicy, plan_policy: PlanPolicy) -> None:
        self._blocks, self._policy, self._plan_policy = blocks, policy, plan_policy
        self._heard: dict[PeerId, PlacedServer] = {}
        self._sequences: dict[PeerId, int] = {}
        self._serving: list[tuple[float, PeerId]] = []
        """The claimed speeds of those that serve, in order."""
        self._loading: set[PeerId] = set()
        self._usual = usual_speed([])
        self._believed: dict[PeerId, PlacedServer] = {}
        self._sums = [0] * blocks
        self._news: dict[PeerId, None] = {}
        """The servers that have changed, in order, since `servers` was asked."""
        self._known: KnownServers | None = None

    def hear(self, peer: PeerId, server: PlacedServer | None, sequence: int) -> None:
        """`peer` is now `server`, or has left. News that are older than those that were heard change nothing."""
        if sequence < self._sequences.get(peer, -1):
            return
        self._sequences[peer] = sequence
        former = self._heard.get(peer)
        if server == former:
            return
        self._known = None
        if former is not None:
            self._count(former, comes=False)
        if server is None:
            del self._heard[peer]
            self._news.pop(peer, None)
            if peer in self._believed:
                self._add(self._believed.pop(peer), -1)
        else:
            self._heard[peer] = server
            self._news[peer] = None
            self._count(server, comes=True)

    def servers(self) -> KnownServers:
        """The servers at the speeds that are believed."""
        if self._known is None:
            self._believe()
            speeds = [units * UNIT for units in self._sums]
            self._known = KnownServers(
                self._blocks, self._believed.values(), self._plan_policy, speeds=speeds, loading=len(self._loading)
            )
        return self._known

    def _count(self, server: PlacedServer, *, comes: bool) -> None:
        """A claim comes or goes."""
        claim = server.speed, server.peer
        if not server.online:
            (self._loading.add if comes else self._loading.remove)(server.peer)
        elif comes:
            insort(self._serving, claim)
        else:
            del self._serving[bisect_left(self._serving, claim)]

    def _believe(self) -> None:
        """The news, and a usual speed that they change, are applied."""
        number = len(self._serving)
        middle = self._serving[(number - 1) // 2 : number // 2 + 1] if number else []
        usual = usual_speed([speed for speed, _ in middle])
        changed = dict(self._news)
        if usual != self._usual:
            most = self._policy.claim_limit * min(usual, self._usual)
            changed.update(dict.fromkeys(sorted(self._loading)))
            first = bisect_right(self._serving, most, key=lambda claim: claim[0])
            changed.update(dict.fromkeys(peer for _, peer in self._serving[first:]))
            self._usual = usual
        for peer in changed:
            if peer in self._believed:
                self._add(self._believed[peer], -1)
            self._believed[peer] = believed_of(self._heard[peer], usual, self._policy)
            self._add(self._believed[peer], 1)
        self._news.clear()

    def _add(self, server: PlacedServer, sign: int) -> None:
        units, sums = sign * round(server.speed / UNIT), self._sums
        for block in range(server.span.start, min(server.span.end, self._blocks)):
            sums[block] += units
