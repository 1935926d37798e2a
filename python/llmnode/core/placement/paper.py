"""The paper's rebalancing (Petals, appendix D): a node moves if, once all others have answered, the swarm is faster.

It is kept as the baseline of `plan`, and as an option. The length of a span does not change here, as in the paper.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.servers import block_speeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.core.span import Span

STAYS = 1e-3
"""A server is taken away with this share more than its speed. So its own place wins against a nearly equal one."""
ROUNDS = 10
"""The others answer in at most this many rounds. They seldom need five."""


def better_span(me: PeerId, blocks: int, servers: Sequence[PlacedServer], gain: float, seed: int = 0) -> Span | None:
    """The span that `me` should serve instead, or None if it should stay. `gain` is the paper's p: 0.2 is 20 %."""
    order = sorted(servers, key=lambda server: server.peer)
    speeds = block_speeds(blocks, order)
    now = min(speeds)
    spans = {server.peer: server.span for server in order}
    mine = next(server for server in order if server.peer == me)
    _add(speeds, mine.span, -mine.speed * (1 + STAYS))
    if now > 0.0 and min(speeds) <= 0.0:
        return None  # the last server of a block stays
    wanted = choose_span(len(mine.span), speeds)
    if wanted == mine.span:
        return None
    spans[me] = wanted
    _add(speeds, wanted, mine.speed)
    _add(speeds, mine.span, mine.speed * STAYS)
    _settle(order, spans, speeds, random.Random(seed))
    then = min(speeds)
    return wanted if then > 0.0 and then >= now * (1 + gain) else None


def _settle(order: Sequence[PlacedServer], spans: dict[PeerId, Span], speeds: list[float], rng: random.Random) -> None:
    """All servers choose again, one after the other, until none moves."""
    turn = list(order)
    for _round in range(ROUNDS):
        rng.shuffle(turn)
        moved = False
        for server in turn:
            span, speed = spans[server.peer], server.speed
            _add(speeds, span, -speed * (1 + STAYS))
            wanted = choose_span(len(span), speeds) if server.movable else span
            _add(speeds, span, speed * STAYS)
            _add(speeds, wanted, speed)
            if wanted != span:
                spans[server.peer], moved = wanted, True
        if not moved:
            return


def _add(speeds: list[float], span: Span, speed: float) -> None:
    for block in range(span.start, span.end):
        speeds[block] += speed
