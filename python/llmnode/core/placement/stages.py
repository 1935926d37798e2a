"""Layouts of a whole cluster before it serves: equal stages, filled like water, and improved by the plan's moves.

The shared plan begins at the swarm as it is, and each of its moves has a price. Here no machine holds blocks yet. So
the model is cut into equal stages, in each number that machines can hold, and the largest machine takes the weakest
stage. The best of these starts are improved until the plan finds no moves. Ties go by peer id, and nothing is random.

Stages need machines that can choose their number of blocks. A node announces its speed at one number, so the nodes of a
swarm do not use this. It is for the owner of a cluster, and gives each machine its `--blocks`.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.policy import LayoutPolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds, most_throughput, throughput, worthwhile_lengths
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from llmnode.core.placement.policy import PlanPolicy

Layout = list[PlacedServer]


def best_of(
    blocks: int,
    layouts: Iterable[Layout],
    worth: Callable[[Layout], float] | None = None,
    most_hops: float = math.inf,
) -> Layout:
    """The layout that is worth most, the first of equals. Some session must need at most `most_hops`.

    `worth` may know more than the speeds of blocks: links, for instance. A layout must be worth at most its throughput.
    Raises ConfigError if no layout serves the whole model in `most_hops`.
    """
    best, most, fewest = None, 0.0, math.inf
    for layout in layouts:
        hops = fewest_hops(blocks, layout)
        fewest = min(fewest, hops)
        bound = throughput(blocks, layout)
        if hops > most_hops or bound <= most:
            continue
        found = bound if worth is None else worth(layout)
        if found > most:
            best, most = layout, found
    if best is None:
        needs = "hold too few blocks together"
        if fewest < math.inf:
            needs = f"need {fewest:g} hops at least, and {most_hops:g} may be used"
        raise ConfigError(f"no layout serves all {blocks} blocks: these machines {needs}")
    return best


def layouts(blocks: int, servers: Iterable[PlacedServer], policy: LayoutPolicy | None = None) -> Iterator[Layout]:
    """The starts, and then each step from the best of them. Each takes one decision.

    A server that is not movable keeps its span. Those of the others do not matter.
    """
    policy, servers = policy or LayoutPolicy(), sorted(servers, key=lambda server: server.peer)
    fixed = [server for server in servers if not server.movable]
    free = [(server, frozenset(worthwhile_lengths(server.speeds))) for server in servers if server.movable]
    free.sort(key=lambda each: -_size(each[0]))
    held = max((len(server.speeds) for server, _ in free), default=0)
    starts = []
    for stages in (0, *(range(math.ceil(blocks / held), blocks + 1) if held else ())):
        starts.append(_start(blocks, fixed, free, stages))
        yield starts[-1]
    starts.sort(key=lambda start: -throughput(blocks, start))
    if throughput(blocks, starts[0]) >= policy.enough * most_throughput(blocks, servers):
        return
    for start in starts[: policy.starts]:
        yield from improvements(blocks, start, policy)


def improvements(blocks: int, layout: Layout, policy: LayoutPolicy) -> Iterator[Layout]:
    """The layout after each plan, until none of the targets leads to moves."""
    fruitless = 0
    for decision in range(policy.decisions):
        target = policy.targets[decision % len(policy.targets)]
        after = carried_out(blocks, layout, replace(policy.plan, targets=(target,)))
        fruitless = fruitless + 1 if after == layout else 0
        if fruitless == len(policy.targets):
            return
        layout = after
        yield layout


def carried_out(blocks: int, layout: Layout, policy: PlanPolicy) -> Layout:
    """The layout after all moves of a plan."""
    moves = {move.peer: move.span for move in plan_moves(blocks, layout, policy).moves}
    return [server.at(moves.get(server.peer, server.span)) for server in layout]


def fewest_hops(blocks: int, servers: Iterable[PlacedServer]) -> float:
    """The hops of the session that needs fewest, or infinity if some block is served by nobody."""
    spans, held, hops = [server.span for server in servers], 0, 0
    while held < blocks:
        further = max((span.end for span in spans if span.start <= held), default=0)
        if further <= held:
            return math.inf
        held, hops = further, hops + 1
    return hops


def _start(
    blocks: int, fixed: Sequence[PlacedServer], free: Sequence[tuple[PlacedServer, Collection[int]]], stages: int
) -> Layout:
    """Equal stages, or none if `stages` is 0. The largest machine takes the weakest one.

    A machine that cannot hold one, or is as fast with more blocks, goes where the paper's rule puts it, after all
    others. `free` has the largest machine first, and the lengths that are worthwhile for each.
    """
    placed, speeds, later = [*fixed], block_speeds(blocks, fixed), []
    spans = [Span(*ends) for ends in pairwise(blocks * cut // stages for cut in range(stages + 1))] if stages else []
    lengths = {len(span) for span in spans}
    weakest = [(min(speeds[span.start : span.end]), number) for number, span in enumerate(spans)]
    heapq.heapify(weakest)
    for server, worthwhile in free:
        if spans and all(length in worthwhile for length in lengths):
            speed, number = weakest[0]
            placed.append(server.at(spans[number]))
            heapq.heapreplace(weakest, (speed + placed[-1].speed, number))
        else:
            later.append(server)
    speeds = block_speeds(blocks, placed)
    for server in later:
        placed.append(server.at(choose_span(len(server.speeds), speeds)))
        for block in range(placed[-1].span.start, placed[-1].span.end):
            speeds[block] += placed[-1].speed
    return sorted(placed, key=lambda server: server.peer)


def _size(server: PlacedServer) -> float:
    """Blocks times tokens a second, at the length where that is most."""
    return max(length * speed for length, speed in enumerate(server.speeds, 1))
