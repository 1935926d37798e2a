"""The announcements that nodes of a simulated swarm have heard. Many nodes share a view, and the plan for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.placement.claims import believed
from llmnode.core.placement.paper import better_span
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.servers import block_speeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.placement.plan import Plan
    from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.core.span import Span


class SharedView:
    """The announcements that some of the nodes have heard of, and what follows from them, until the next change."""

    def __init__(self, blocks: int, policy: RebalancePolicy, plan_policy: PlanPolicy) -> None:
        self._blocks, self._policy, self._plan_policy = blocks, policy, plan_policy
        self._heard: dict[PeerId, PlacedServer] = {}
        self._sequences: dict[PeerId, int] = {}
        self._servers: list[PlacedServer] | None = None
        self._plan: Plan | None = None
        self._speeds: list[float] | None = None
        self._paper: dict[PeerId, Span | None] = {}

    def hear(self, peer: PeerId, server: PlacedServer | None, sequence: int) -> None:
        """`peer` is now `server`, or has left. News that are older than those that were heard change nothing."""
        if sequence < self._sequences.get(peer, -1):
            return
        self._sequences[peer] = sequence
        if server is None:
            self._heard.pop(peer, None)
        else:
            self._heard[peer] = server
        self._servers = self._plan = self._speeds = None
        self._paper = {}

    def servers(self) -> list[PlacedServer]:
        if self._servers is None:
            self._servers = believed(self._heard.values(), self._policy)
        return self._servers

    def plan(self, servers: Sequence[PlacedServer]) -> Plan:
        if servers is not self._servers:
            return plan_moves(self._blocks, servers, self._plan_policy)
        if self._plan is None:
            self._plan = plan_moves(self._blocks, servers, self._plan_policy)
        return self._plan

    def speeds(self, servers: Sequence[PlacedServer]) -> Sequence[float]:
        """The tokens a second of each block."""
        if servers is not self._servers:
            return block_speeds(self._blocks, servers)
        if self._speeds is None:
            self._speeds = block_speeds(self._blocks, servers)
        return self._speeds

    def paper(self, me: PeerId, servers: Sequence[PlacedServer]) -> Span | None:
        if servers is not self._servers:
            return better_span(me, self._blocks, servers, self._policy.paper_gain)
        if me not in self._paper:
            self._paper[me] = better_span(me, self._blocks, servers, self._policy.paper_gain)
        return self._paper[me]
