"""The servers that a node knows of, and what follows from them. Each figure is found when it is first asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, overload

from llmnode.core.placement.claims import slowed, usual_speed
from llmnode.core.placement.paper import better_span
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.policy import PlanPolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.placement.plan import Plan
    from llmnode.core.span import Span


class KnownServers(Sequence[PlacedServer]):
    """Servers that do not change. Nodes of a simulated swarm that share a view share the figures, too."""

    def __init__(
        self,
        blocks: int,
        servers: Iterable[PlacedServer],
        plan_policy: PlanPolicy | None = None,
        *,
        speeds: Sequence[float] | None = None,
        loading: int | None = None,
    ) -> None:
        """The `speeds` of all blocks, and the number of servers that are `loading`, may be known already."""
        self._blocks, self._plan_policy = blocks, plan_policy or PlanPolicy()
        self._servers = list(servers)
        self._speeds, self._loading = speeds, loading
        self._paper: dict[tuple[PeerId, float], Span | None] = {}
        self._others: dict[Hashable, KnownServers] = {}

    def __len__(self) -> int:
        return len(self._servers)

    @overload
    def __getitem__(self, place: int) -> PlacedServer: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[PlacedServer]: ...
    def __getitem__(self, place: int | slice) -> PlacedServer | Sequence[PlacedServer]:
        return self._servers[place]

    @cached_property
    def by_peer(self) -> dict[PeerId, PlacedServer]:
        return {server.peer: server for server in self._servers}

    @cached_property
    def speeds(self) -> Sequence[float]:
        """The tokens a second of each block."""
        return block_speeds(self._blocks, self._servers) if self._speeds is None else self._speeds

    @cached_property
    def loading(self) -> int:
        """The servers that load their blocks."""
        return sum(not server.online for server in self._servers) if self._loading is None else self._loading

    @cached_property
    def at_slowest(self) -> Sequence[PeerId]:
        """The servers of the slowest block, the first of equals, that are online."""
        slowest = min(range(self._blocks), key=self.speeds.__getitem__)
        return [
            server.peer for server in self._servers if server.span.start <= slowest < server.span.end and server.online
        ]

    @cached_property
    def usual(self) -> float:
        """The median speed of those that are online."""
        return usual_speed([server.speed for server in self._servers if server.online])

    def relied_on(self, draw: float) -> PeerId | None:
        """A server that a number `draw` from [0, 1) chooses, by how much the speed of some block rests on it alone.

        The weight is the square of its share of that block's speed. None if nobody serves.
        """
        total = self._reliance[-1] if self._reliance else 0.0
        return self._servers[bisect_right(self._reliance, draw * total)].peer if total > 0.0 else None

    @cached_property
    def _reliance(self) -> Sequence[float]:
        """The sums of the weights of the servers up to each."""
        speeds, last = self.speeds, self._blocks

        def weight(server: PlacedServer) -> float:
            span = server.span
            least = min(speeds[span.start : min(span.end, last)], default=0.0)
            return (server.speed / least) ** 2 if server.online and least > 0.0 else 0.0

        return list(accumulate(map(weight, self._servers)))

    @cached_property
    def plan(self) -> Plan:
        return plan_moves(self._blocks, self._servers, self._plan_policy)

    def better_span(self, me: PeerId, gain: float) -> Span | None:
        """The answer of the paper's rule for `me`."""
        if (me, gain) not in self._paper:
            self._paper[me, gain] = better_span(me, self._blocks, self._servers, gain)
        return self._paper[me, gain]

    def without(self, peers: Iterable[PeerId]) -> KnownServers:
        """The same servers but for `peers`."""
        gone = frozenset(peer for peer in peers if peer in self.by_peer)
        return self._changed("without", gone, dict.fromkeys(gone))

    def where_stay(self, peers: Iterable[PeerId]) -> KnownServers:
        """The same servers, of which `peers` stay where they are."""
        own = self.by_peer
        staying = frozenset(peer for peer in peers if peer in own and own[peer].movable)
        return self._changed("stay", staying, {peer: replace(own[peer], movable=False) for peer in staying})

    def at_most(self, tokens_per_s: Mapping[PeerId, float]) -> KnownServers:
        """The same servers, of which none is faster than its limit, if it has one."""
        own = self.by_peer
        slow = {peer: most for peer, most in tokens_per_s.items() if peer in own and own[peer].speed > most}
        limits = frozenset(slow.items())
        return self._changed("slow", limits, {peer: slowed(own[peer], most) for peer, most in slow.items()})

    def _changed(self, how: str, key: Hashable, instead: Mapping[PeerId, PlacedServer | None]) -> KnownServers:
        """The same with others `instead` of some, or with none in their place. `how` and `key` name the change."""
        if not instead:
            return self
        if (how, key) not in self._others:
            servers = (instead.get(each.peer, each) for each in self._servers)
            kept = [each for each in servers if each is not None]
            self._others[how, key] = KnownServers(self._blocks, kept, self._plan_policy)
        return self._others[how, key]
