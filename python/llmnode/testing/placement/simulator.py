"""A swarm of throughputs in virtual time: no tensors and no network, but the node's own functions of placement.

Nodes see what was announced a while ago, and some announcements late. A move drains, then loads; the KV that it loses
is computed again elsewhere. The outcome is the throughput that is left after all that.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING

from llmnode.core.placement.joining import choose_span, choose_together
from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
from llmnode.core.placement.rebalancing import Rebalancer
from llmnode.core.placement.servers import PlacedServer
from llmnode.core.span import Span
from llmnode.testing.placement.shared_view import SharedView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.testing.placement.hosts import Host, Uptime

NEGLIGIBLE = 1e-6
"""Tokens a second. Sums of speeds that are added and taken away again are not exact."""


class Rule(StrEnum):
    """How nodes choose their blocks."""

    RANDOM = "no balancing"
    NEW_ONLY = "new servers only"
    PAPER = "paper"
    PLAN = "plan"


@dataclass(frozen=True, slots=True)
class SwarmConditions:
    """The troubles of a swarm, and the cost of a move."""

    blocks: int = 70
    load_s_per_block: float = 20.0
    """A block of BLOOM-176B in 8 bits has 2.5 GB: 20 s at 1 Gbit/s."""
    drain_s: float = 10.0
    """A node that moves serves its sessions for this long, and then serves nothing until it has loaded."""
    replay_s: float = 5.0
    """The sessions of a server that moves have their KV computed again elsewhere: this many seconds of its speed."""
    keeps_serving: bool = False
    """Whether nodes have memory for their old blocks while they load the new ones."""
    stale_s: float = 10.0
    """A view shows what was true up to this long ago."""
    lost: float = 0.1
    """The share of announcements that are lost. Each is made again after `announce_every_s`."""
    announce_every_s: float = 15.0
    lifetime_s: float = 45.0
    """A node that left without a farewell is out of all views after this time."""
    exchange_every_s: float = 0.0
    """A view hears news this often, all that have come since. With 0 it hears each as it comes."""
    views: int = 4
    """Nodes share this many different views, which hear of each change at different times."""


@dataclass(slots=True)
class SwarmFigures:
    """The figures of a swarm after its simulation."""

    seconds: float = 0.0
    tokens: float = 0.0
    """The sum over all sessions, in the whole time."""
    replayed_tokens: float = 0.0
    decisions: int = 0
    """The times that a node considered a move."""
    moves: int = 0
    loaded_blocks: int = 0
    most_moving: int = 0
    """The most servers that were moving at once."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """The times, from and to, when some block was served by nobody although the servers that were on could hold all."""
    throughputs: list[tuple[float, float]] = field(default_factory=list)
    """Times, and the tokens a second from there on."""
    moved: dict[PeerId, list[tuple[float, Span]]] = field(default_factory=dict)

    @property
    def net_tokens_per_s(self) -> float:
        return (self.tokens - self.replayed_tokens) / self.seconds

    @property
    def gap_s(self) -> float:
        return sum(to_s - from_s for from_s, to_s in self.gaps)

    def gap_s_beyond(self, allowed_s: float) -> float:
        """The seconds by which gaps lasted longer than it takes to notice one, move and load."""
        return sum(max(0.0, to_s - from_s - allowed_s) for from_s, to_s in self.gaps)


@dataclass(slots=True)
class _Node:
    host: Host
    span: Span
    view: int
    life: int
    """The number of its start: what was planned for an earlier one is void."""
    online: bool = False
    joined_s: float = 0.0
    loaded_s: float = 0.0
    """When its first blocks are loaded."""
    serves: Span | None = None
    """The blocks that it really serves now."""
    rebalancer: Rebalancer | None = None

    def announced(self) -> PlacedServer:
        speeds = self.host.speeds if self.host.boast == 1.0 else tuple(s * self.host.boast for s in self.host.speeds)
        return PlacedServer(self.host.peer, self.span, speeds, online=self.online)


def simulate_placement(
    hosts: Sequence[Host],
    rule: Rule,
    seconds: float,
    seed: int = 0,
    conditions: SwarmConditions | None = None,
    policy: RebalancePolicy | None = None,
    plan_policy: PlanPolicy | None = None,
) -> SwarmFigures:
    """Simulates a swarm of `hosts` in which every node decides by `rule`. The seed decides everything."""
    swarm = _Swarm(
        rule, seed, conditions or SwarmConditions(), policy or RebalancePolicy(), plan_policy or PlanPolicy()
    )
    for host in hosts:
        for uptime in host.uptimes:
            swarm.at(uptime.from_s, swarm.start, host, uptime)
    return swarm.run(seconds)


class _Swarm:
    def __init__(
        self, rule: Rule, seed: int, conditions: SwarmConditions, policy: RebalancePolicy, plan_policy: PlanPolicy
    ) -> None:
        self._rule, self._conditions, self._policy = rule, conditions, policy
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = count()
        self._now_s = 0.0
        self._nodes: dict[PeerId, _Node] = {}
        self._views = [SharedView(conditions.blocks, policy, plan_policy) for _ in range(conditions.views)]
        self._speeds = [0.0] * conditions.blocks
        self._could_hold = 0
        self._gap_from_s: float | None = None
        self._moving: set[int] = set()
        """The lives of the nodes that are moving."""
        self._outcome = SwarmFigures()

    def at(self, time_s: float, what: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._number), what, args))

    def run(self, seconds: float) -> SwarmFigures:
        outcome, throughput = self._outcome, 0.0
        while self._events and self._events[0][0] < seconds:
            time_s, _, what, args = heapq.heappop(self._events)
            outcome.tokens += throughput * (time_s - self._now_s)
            self._now_s = time_s
            what(*args)
            after = self._throughput()
            if after != throughput:
                throughput = after
                outcome.throughputs.append((time_s, throughput))
            self._note_gap(throughput)
        outcome.tokens += throughput * (seconds - self._now_s)
        outcome.seconds = self._now_s = seconds
        self._note_gap(1.0)
        return outcome

    # A node's life

    def start(self, host: Host, uptime: Uptime) -> None:
        view = self._rng.randrange(len(self._views))
        span = self._first_span(host, self._views[view])
        node = _Node(host, span, view, next(self._number), joined_s=self._now_s)
        self._nodes[host.peer] = node
        if self._rule in (Rule.PAPER, Rule.PLAN) and not host.ghost:
            node.rebalancer = Rebalancer(
                host.peer, self._conditions.blocks, self._rng, self._policy, by_paper=self._rule is Rule.PAPER
            )
            self.at(self._now_s + self._rng.uniform(0, self._policy.check_every_s), self._check, node, node.life)
        if not host.ghost:
            self._could_hold += len(host.speeds)
        self._load_first(node)
        if self._rule is not Rule.RANDOM and not host.ghost:
            self.at(self._now_s + self._policy.joins_together_s, self._look_again, node, node.life)
        self.at(uptime.to_s, self._leave, node, uptime.crashes)

    def _load_first(self, node: _Node) -> None:
        self._tell(node.host.peer, node.announced())
        load_s = 0.0 if node.host.ghost else len(node.span) * self._conditions.load_s_per_block
        node.loaded_s = self._now_s + load_s
        self.at(node.loaded_s, self._loaded, node, node.life)

    def _look_again(self, node: _Node, life: int) -> None:
        """Does the same as `node/serve/placing.py`."""
        if node.life != life or self._now_s >= node.loaded_s:
            return
        me, since_s = node.host.peer, node.joined_s - self._policy.joins_together_s
        others = [each for peer, each in self._views[node.view].servers().by_peer.items() if peer != me]
        loading = [self._nodes[each.peer] for each in others if not each.online and each.peer in self._nodes]
        joining = {each.host.peer for each in loading if each.joined_s > since_s}
        better = choose_together(self._conditions.blocks, me, node.span, others, joining)
        if better != node.span:
            node.span = better
            self._load_first(node)

    def _loaded(self, node: _Node, life: int) -> None:
        if node.life != life or self._now_s < node.loaded_s:  # it loads others instead
            return
        self._moving.discard(life)
        node.online = True
        if not node.host.ghost:
            self._serve(node, node.span)
        self._tell(node.host.peer, node.announced())

    def _leave(self, node: _Node, crashes: bool) -> None:
        self._serve(node, None)
        if not node.host.ghost:
            self._could_hold -= len(node.host.speeds)
        self._moving.discard(node.life)
        node.life = -1
        del self._nodes[node.host.peer]
        lifetime_s = self._conditions.lifetime_s - self._rng.uniform(0, self._conditions.announce_every_s)
        self._tell(node.host.peer, None, lifetime_s if crashes else 0.0)

    def _check(self, node: _Node, life: int) -> None:
        if node.life != life:
            return
        assert node.rebalancer is not None
        servers = self._views[node.view].servers()
        known = servers.by_peer.get(node.host.peer)
        if node.online and known is not None and known.span == node.span:
            for peer in node.rebalancer.absent_of(servers.by_peer):
                if peer in self._nodes and not self._nodes[peer].host.ghost:
                    node.rebalancer.note_present(peer)
            decision = node.rebalancer.decide(servers, self._now_s)
            self._outcome.decisions += 1
            absent = [peer for peer in decision.confirm if peer not in self._nodes or self._nodes[peer].host.ghost]
            for peer in absent:
                node.rebalancer.note_absent(peer, self._now_s)
            for peer in decision.tries:
                if peer not in absent:
                    tried = self._nodes[peer]
                    node.rebalancer.note_pace(peer, tried.host.speeds[len(tried.span) - 1], self._now_s)
            if decision.span is not None and not absent:
                self._move(node, decision.span, 0.0 if decision.at_once else self._conditions.drain_s)
        self.at(self._now_s + node.rebalancer.pause_s(servers), self._check, node, life)

    def _move(self, node: _Node, span: Span, drain_s: float) -> None:
        assert node.rebalancer is not None
        node.rebalancer.note_move(self._now_s)
        kept = max(0, min(span.end, node.span.end) - max(span.start, node.span.start))
        load_s = (len(span) - kept) * self._conditions.load_s_per_block
        outcome = self._outcome
        outcome.moves += 1
        outcome.loaded_blocks += len(span) - kept
        outcome.replayed_tokens += node.host.speeds[len(node.span) - 1] * self._conditions.replay_s
        outcome.moved.setdefault(node.host.peer, []).append((self._now_s, span))
        self._moving.add(node.life)
        outcome.most_moving = max(outcome.most_moving, len(self._moving))
        node.span, node.online = span, False
        self._tell(node.host.peer, node.announced())
        serves_s = drain_s + (load_s if self._conditions.keeps_serving else 0.0)
        self.at(self._now_s + serves_s, self._stop_serving, node, node.life)
        self.at(self._now_s + drain_s + load_s, self._loaded, node, node.life)

    def _stop_serving(self, node: _Node, life: int) -> None:
        if node.life == life:
            self._serve(node, None)

    # Decisions of a node, and news for the others

    def _first_span(self, host: Host, view: SharedView) -> Span:
        blocks, length = self._conditions.blocks, len(host.speeds)
        if host.ghost:
            return Span(0, length)
        if self._rule is Rule.RANDOM:
            start = self._rng.randrange(blocks - length + 1)
            return Span(start, start + length)
        return choose_span(length, view.servers().speeds)

    def _tell(self, peer: PeerId, server: PlacedServer | None, delay_s: float = 0.0) -> None:
        """A change reaches each view after a while. One that is lost comes with a later announcement."""
        sequence = next(self._number)
        for view in self._views:
            late_s = self._rng.uniform(0, self._conditions.stale_s) + delay_s
            while self._rng.random() < self._conditions.lost:
                late_s += self._conditions.announce_every_s
            self.at(self._exchanged_s(self._now_s + late_s), view.hear, peer, server, sequence)

    def _exchanged_s(self, time_s: float) -> float:
        every_s = self._conditions.exchange_every_s
        return math.ceil(time_s / every_s) * every_s if every_s else time_s

    # Throughput

    def _serve(self, node: _Node, span: Span | None) -> None:
        """The node really serves `span` from now on."""
        for served, sign in ((node.serves, -1), (span, 1)):
            if served is not None:
                speed = sign * node.host.speeds[len(served) - 1]
                for block in range(served.start, served.end):
                    self._speeds[block] += speed
        node.serves = span

    def _throughput(self) -> float:
        least = min(self._speeds)
        return least if least > NEGLIGIBLE else 0.0

    def _note_gap(self, throughput: float) -> None:
        gap = throughput <= 0.0 and self._could_hold >= self._conditions.blocks
        if gap and self._gap_from_s is None:
            self._gap_from_s = self._now_s
        elif not gap and self._gap_from_s is not None:
            self._outcome.gaps.append((self._gap_from_s, self._now_s))
            self._gap_from_s = None
