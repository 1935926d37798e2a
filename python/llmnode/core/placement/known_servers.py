"""The servers that a node knows of, and what follows from them. Each figure is found when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, overload

from llmnode.core.placement.paper import better_span
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.policy import PlanPolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

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
        self._others: dict[tuple[Set[PeerId], bool], KnownServers] = {}

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
    def plan(self) -> Plan:
        return plan_moves(self._blocks, self._servers, self._plan_policy)

    def better_span(self, me: PeerId, gain: float) -> Span | None:
        """The answer of the paper's rule for `me`."""
        if (me, gain) not in self._paper:
            self._paper[me, gain] = better_span(me, self._blocks, self._servers, gain)
        return self._paper[me, gain]

    def without(self, peers: Iterable[PeerId]) -> KnownServers:
        """The same servers but for `peers`."""
        return self._other(frozenset(peer for peer in peers if peer in self.by_peer), stay=False)

    def where_stay(self, peers: Iterable[PeerId]) -> KnownServers:
        """The same servers, of which `peers` stay where they are."""
        movable = (peer for peer in peers if peer in self.by_peer and self.by_peer[peer].movable)
        return self._other(frozenset(movable), stay=True)

    def _other(self, peers: Set[PeerId], *, stay: bool) -> KnownServers:
        if not peers:
            return self
        if (peers, stay) not in self._others:
            servers = (
                [replace(each, movable=False) if each.peer in peers else each for each in self._servers]
                if stay
                else [each for each in self._servers if each.peer not in peers]
            )
            self._others[peers, stay] = KnownServers(self._blocks, servers, self._plan_policy)
        return self._others[peers, stay]
