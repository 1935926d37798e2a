"""Limits of placement, see `core/placement/README.md`. The simulator and `bench placement` found the values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """How the shared plan looks for moves, see `core/placement/plan.py`."""

    moves: int = 12
    """A plan has at most this many moves. Later ones would meet another swarm than the one that was planned for."""
    price: float = 0.3
    """A move must raise the throughput of the swarm by this share, divided by the number of servers: a load and lost KV
    cost that share of what one server does."""
    least_prices: float = 2.0
    """A whole plan must raise it by this many prices of one move. Otherwise small differences between views would move
    servers."""
    targets: tuple[float, ...] = (math.inf, 1.05, 1.2, 1.5)
    """The search is done with each of these targets, in throughputs of now, until `tries` are spent. The first is the
    bound on any placement."""
    candidates: int = 200
    """This many servers, best by a linear estimate, are tried at all of their places for each move."""
    pairs: int = 16
    """When no single move helps, this many first moves are each tried with a second one."""
    tries: int = 1500
    """A plan tries this many servers and lengths: some 30 ms of Python. It finds pairs of moves in small swarms."""


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """When a node acts on a decision, see `core/placement/rebalancing.py`."""

    check_every_s: float = 60.0
    """A node considers a move this often, as in the paper."""
    gap_check_every_s: float = 5.0
    """It does so this often while nobody serves some block."""
    jitter: float = 0.2
    """The share by which these times vary: nodes that joined together do not decide together."""
    turn_s: float = 20.0
    """The node whose move comes n-th in the plan waits n times this long. If those before it do not move, it does."""
    unmoved_s: float = 300.0
    """A server whose move is the plan's first for this long, and that does not make it, is taken to stay."""
    rest_s: float = 120.0
    """After a move a node makes no other one for this long, unless nobody serves some block."""
    loading_share: float = 0.1
    """No move begins while more than this share of the servers is loading blocks, unless there is a gap."""
    paper_gain: float = 0.2
    """The paper's p: its rule moves a node only for this much more throughput."""
    absent_s: float = 600.0
    """A server that could not be reached when a node was about to rely on it does not count for this long."""
    failed_s: float = 3600.0
    """A node does not try blocks again for this long that it could not load."""
    confirm: int = 8
    """Before a move, at most this many servers of the blocks that are left are asked whether they are there."""
    claim_limit: float = 2.0
    """No speed counts for more than this many times the median: a liar can draw others away only that far."""
    pace_keeps_s: float = 3600.0
    """A server whose pace was tried is not tried again for this long by the same node."""
    refusals: int = 3
    """A server that has refused this many trials in a row counts as slow: full servers do, and liars."""
    draws: int = 8
    """A node draws this many servers on which blocks rest, in each decision to stay."""
    tried_at_once: int = 4
    """It tries at most this many of these, which it has not tried yet."""
    drains_within_s: float = 20.0
    """A node that drains counts for this long in the plans of others. Then it has left, or joins elsewhere."""
    joins_together_s: float = 25.0
    """A node that still loads its first blocks after this time chooses once more, beside those that join with it. By
    then it has heard of them, even if news got lost."""
    joins_within_s: float = 600.0
    """A node that loads for longer than this does not keep others away from its blocks."""


@dataclass(frozen=True, slots=True)
class LayoutPolicy:
    """How a cluster that does not serve yet is laid out, see `core/placement/stages.py`. A move costs nothing there."""

    plan: PlanPolicy = PlanPolicy(price=0.0, moves=24, tries=500)
    targets: tuple[float, ...] = (1.02, 1.05, 1.1, 1.2, 1.3, 1.5, math.inf)
    """One target for each plan in turn, in throughputs of now, until none of them finds a move."""
    starts: int = 6
    """This many starts are improved: the best start does not always lead to the best layout."""
    enough: float = 0.99
    """No start is improved if one has this share of the bound. The starts of thousands of machines do."""
    decisions: int = 80
    """Each start is improved by at most this many plans. Those of Helix' clusters need 7 to 20."""
