"""When a node moves to other blocks: one at a time, not at once, and never away from blocks that need it.

Nothing here knows a clock or a network. `llmnode.node.serve.rebalance` asks every few seconds and carries the answer
out, and `llmnode.testing.placement` does the same for thousands of simulated nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.placement.known_servers import KnownServers
from llmnode.core.placement.plan import helps_alone
from llmnode.core.placement.policy import RebalancePolicy

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.core.span import Span


@dataclass(frozen=True, slots=True)
class Decision:
    """A node should do this now. Before it moves, it makes sure that the peers in `confirm` are there."""

    span: Span | None = None
    """The span to move to. With None the node stays."""
    confirm: Sequence[PeerId] = ()
    """Servers of the blocks that it leaves; or, if it stays, some that nothing was heard of but announcements."""
    tries: Sequence[PeerId] = ()
    """Those in `confirm` whose pace it tries, too. It tells the outcomes to `Rebalancer.note_pace`."""
    at_once: bool = False
    """Nobody serves some block, so no session can go on anyway: sessions need no time to end."""


class Rebalancer:
    """The memory of one node between its decisions."""

    def __init__(
        self,
        me: PeerId,
        blocks: int,
        rng: random.Random,
        policy: RebalancePolicy | None = None,
        *,
        by_paper: bool = False,
    ) -> None:
        """`by_paper` decides by the paper's rule. Servers may be given as `KnownServers`, which remember their plan."""
        self._me = me
        self._blocks = blocks
        self._rng = rng
        self._policy = policy or RebalancePolicy()
        self._by_paper = by_paper
        self._rests_until_s = float("-inf")
        self._waits_since_s: float | None = None
        self._absent: dict[PeerId, float] = {}
        self._absences: dict[PeerId, tuple[float, float]] = {}
        """How long each peer's latest absence counts, and until when that is remembered."""
        self._stays: dict[PeerId, float] = {}
        """Peers that did not make the move that was theirs, and until when they count as staying."""
        self._first: tuple[PeerId, float] | None = None
        """The peer whose move is the first of the plan, and since when."""
        self._failed: dict[Span, float] = {}
        self._paces: dict[PeerId, _Pace] = {}

    def pause_s(self, servers: Sequence[PlacedServer]) -> float:
        """The time until the next decision."""
        soon = self.sees_gap(servers) or self._waits_since_s is not None
        every_s = self._policy.gap_check_every_s if soon else self._policy.check_every_s
        return every_s * self._rng.uniform(1 - self._policy.jitter, 1 + self._policy.jitter)

    def sees_gap(self, servers: Sequence[PlacedServer]) -> bool:
        """Whether nobody serves some block, as far as the node knows."""
        return min(self._present(servers).speeds) <= 0.0

    def note_move(self, now_s: float) -> None:
        """The node has begun to move."""
        self._rests_until_s, self._waits_since_s = now_s + self._policy.rest_s, None

    def note_absent(self, peer: PeerId, now_s: float) -> None:
        """`peer` could not be reached. It is left out for `absent_s`, and for longer each further time."""
        lasted_s, _ = self._absences.get(peer, (self._policy.absent_s / 2, now_s))
        lasts_s = min(2 * lasted_s, self._policy.failed_s)
        self._absent[peer] = now_s + lasts_s
        self._absences[peer] = lasts_s, now_s + lasts_s + self._policy.failed_s

    def note_present(self, peer: PeerId) -> None:
        """`peer` answers again."""
        self._absent.pop(peer, None)

    def absent_of(self, peers: Iterable[PeerId]) -> Sequence[PeerId]:
        """Some of those that do not count since they could not be reached: they may be there again."""
        absent = [peer for peer in peers if peer in self._absent]
        return self._rng.sample(absent, min(len(absent), self._policy.confirm))

    def note_pace(self, peer: PeerId, tokens_per_s: float | None, now_s: float) -> None:
        """`peer` was tried and has shown this speed, or has refused the trial.

        It counts at most `claim_limit` times as fast, whatever it says. After some refusals it counts as slow.
        """
        if tokens_per_s is not None:
            self._paces[peer] = _Pace(now_s, tokens_per_s)
        else:
            before = self._paces.get(peer, _Pace(now_s, math.inf))
            self._paces[peer] = replace(before, tried_s=now_s, refused=before.refused + 1)

    def note_failed(self, span: Span, now_s: float) -> None:
        """The node could not serve `span`. It does not try again for a while."""
        self._failed[span] = now_s + self._policy.failed_s

    def decide(self, servers: Sequence[PlacedServer], now_s: float) -> Decision:
        """The node decides by what it believes of all servers of its model, itself included."""
        self._absent = {each: until_s for each, until_s in self._absent.items() if until_s > now_s}
        self._absences = {peer: each for peer, each in self._absences.items() if each[1] > now_s}
        known = self._present(servers)
        own, keeps_s = known.by_peer, self._policy.pace_keeps_s
        self._paces = {
            peer: pace for peer, pace in self._paces.items() if peer in own or now_s < pace.tried_s + keeps_s
        }
        mine = known.by_peer.get(self._me)
        if mine is None or not mine.online or not mine.movable:
            self._waits_since_s = None
            return Decision()
        gap = min(known.speeds) <= 0.0
        if not gap and (now_s < self._rests_until_s or self._many_load(known)):
            self._first = None  # nobody else may move, either
            return Decision()
        if self._by_paper:
            wanted = known.better_span(self._me, self._policy.paper_gain)
        else:
            wanted = self._planned(known, mine, now_s, gap=gap)
        if wanted is None:
            return self._doubting(known, now_s)
        holders = _holders(mine, wanted, known, self._policy.confirm)
        return Decision() if holders is None else Decision(wanted, holders, at_once=gap)

    def confirm(self, servers: Sequence[PlacedServer], wanted: Span, now_s: float) -> Sequence[PeerId] | None:
        """Whether the node, which has begun to move to `wanted`, is still to leave its blocks: the peers to ask before.

        None if the plan moves it no more, or elsewhere, or if nobody else serves some of its blocks. `servers` are
        those of `before_moves`: the node itself is where it still serves.
        """
        known = self._present(servers)
        mine = known.by_peer.get(self._me)
        if mine is None:
            return None
        speeds = known.speeds
        if any(speeds[block] <= 0.0 for block in range(wanted.start, wanted.end)):
            planned: Span | None = wanted  # to close a gap is worth it, whatever else the plan has
        elif self._by_paper:
            planned = known.better_span(self._me, self._policy.paper_gain)
        else:
            moves = self._as_they_move(known, now_s).plan.moves
            planned = next((move.span for move in moves if move.peer == self._me), None)
        if planned is None or not planned.meets(wanted):
            return None
        return _holders(mine, wanted, known, self._policy.confirm)

    def _present(self, servers: Sequence[PlacedServer]) -> KnownServers:
        known = servers if isinstance(servers, KnownServers) else KnownServers(self._blocks, servers)
        known = known.without(self._absent) if self._absent else known
        if self._paces:
            slow, policy = known.usual / self._policy.claim_limit, self._policy
            known = known.at_most({peer: pace.limit(policy, slow) for peer, pace in self._paces.items()})
        return known

    def _as_they_move(self, known: KnownServers, now_s: float) -> KnownServers:
        """The servers, of which those that did not make their move stay where they are."""
        self._stays = {peer: until_s for peer, until_s in self._stays.items() if until_s > now_s}
        return known.where_stay(self._stays) if self._stays else known

    def _note_first(self, peer: PeerId | None, now_s: float, *, gap: bool) -> None:
        """A server that is to move first, and does not for long, stays: its user wants it so, or it is not there.

        While there is a gap, two turns are long enough.
        """
        if peer is None or peer == self._me:
            self._first = None
        elif self._first is None or self._first[0] != peer:
            self._first = peer, now_s
        elif now_s >= self._first[1] + (2 * self._policy.turn_s if gap else self._policy.unmoved_s):
            self._stays[peer] = now_s + self._policy.failed_s
            self._first = None

    def _many_load(self, known: KnownServers) -> bool:
        return known.loading > max(1, int(self._policy.loading_share * len(known)))

    def _planned(self, known: KnownServers, mine: PlacedServer, now_s: float, *, gap: bool) -> Span | None:
        """The node's own move in the plan, once it is its turn. While there is a gap all moves begin together.

        If moves before it have not been made by then, it must help without them.
        """
        plan = self._as_they_move(known, now_s).plan
        moves = plan.moves
        self._note_first(moves[0].peer if moves else None, now_s, gap=gap)
        turn = next((turn for turn, move in enumerate(moves) if move.peer == self._me), None)
        if turn is None:
            self._waits_since_s = None
            return None
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if gap or now_s >= self._waits_since_s + turn * self._policy.turn_s:
            span = moves[turn].span
            if turn and not gap and not helps_alone(known.speeds, mine, span, plan):
                self._waits_since_s = None
                return None
            return span if self._failed.get(span, now_s) <= now_s else None
        return None

    def _doubting(self, known: KnownServers, now_s: float) -> Decision:
        """The node stays, and asks a server of the slowest block: without it, the swarm would need others there.

        It also tries the pace of some on which blocks rest: others leave such blocks to them, on their word.
        """
        slowest = [peer for peer in known.at_slowest if peer != self._me]
        asked = [self._rng.choice(slowest)] if slowest else []
        tried = self._untried(known, now_s)
        return Decision(confirm=[*dict.fromkeys((*asked, *tried))], tries=tried)

    def _untried(self, known: KnownServers, now_s: float) -> Sequence[PeerId]:
        drawn = [known.relied_on(self._rng.random()) for _draw in range(self._policy.draws)]
        own = dict.fromkeys(peer for peer in drawn if peer is not None and peer != self._me)
        return [peer for peer in own if not self._is_tried(peer, now_s)][: self._policy.tried_at_once]

    def _is_tried(self, peer: PeerId, now_s: float) -> bool:
        pace = self._paces.get(peer)
        return pace is not None and not pace.is_due(now_s, self._policy)


@dataclass(frozen=True, slots=True)
class _Pace:
    """The outcome of the latest trial of a server."""

    tried_s: float
    tokens_per_s: float
    """Infinite while it has only refused."""
    refused: int = 0
    """The refusals since."""

    def is_due(self, now_s: float, policy: RebalancePolicy) -> bool:
        again = 0 < self.refused < policy.refusals
        return now_s >= self.tried_s + (policy.check_every_s if again else policy.pace_keeps_s)

    def limit(self, policy: RebalancePolicy, slow: float) -> float:
        """The most tokens a second that it counts for. Those that are slow have at most `slow`."""
        shown = policy.claim_limit * self.tokens_per_s
        return min(shown, slow) if self.refused >= policy.refusals else shown


def _holders(mine: PlacedServer, wanted: Span, servers: Sequence[PlacedServer], most: int) -> Sequence[PeerId] | None:
    """Servers that hold all blocks that are left, the longest first; None if there are not enough of them."""
    left = _blocks(mine.span) - _blocks(wanted)
    others = [server for server in servers if server.online and server.peer != mine.peer]
    chosen: list[PeerId] = []
    while left:
        if len(chosen) == most or not others:
            return None
        held, peer = max((len(left & _blocks(server.span)), server.peer) for server in others)
        if not held:
            return None
        chosen.append(peer)
        left -= _blocks(next(server.span for server in others if server.peer == peer))
    return chosen


def _blocks(span: Span) -> set[int]:
    return set(range(span.start, span.end))
