"""Routes: which peers a session goes through.

Knows no network: what peers hold is told, a route is answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llmnode.core.span import Span
from llmnode.errors import NoRoute

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class Hop:
    """A peer and the blocks it computes for one session; at most the span that it holds."""

    peer: PeerId
    span: Span


Route: TypeAlias = tuple[Hop, ...]
"""Hops that cover a model's blocks, in order ("chain" in the papers)."""


def find_route(blocks: int, held: Iterable[Hop]) -> Route:
    """Cover blocks 0 to `blocks` with as few hops as `held` (peers and all that they hold) allows.

    Taking the holder that reaches furthest at each hop is optimal for covering a line with intervals. Ties go to the
    peer named first. Raises NoRoute with every span that nobody holds.
    """
    holders = list(held)
    missing = uncovered(blocks, [hop.span for hop in holders])
    if missing:
        raise NoRoute(missing)
    route: list[Hop] = []
    block = 0
    while block < blocks:
        best = max((hop for hop in holders if hop.span.start <= block), key=lambda hop: hop.span.end)
        route.append(Hop(best.peer, Span(block, min(best.span.end, blocks))))
        block = best.span.end
    return tuple(route)


def uncovered(blocks: int, spans: Sequence[Span]) -> list[Span]:
    """The maximal spans of a model of `blocks` blocks that none of `spans` covers."""
    gaps: list[Span] = []
    reached = 0
    for span in sorted(spans):
        if span.start > reached:
            gaps.append(Span(reached, min(span.start, blocks)))
        reached = max(reached, span.end)
        if reached >= blocks:
            return gaps
    if reached < blocks:
        gaps.append(Span(reached, blocks))
    return gaps
