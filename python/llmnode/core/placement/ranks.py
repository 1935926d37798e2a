"""The servers that are most worth a try in a search for moves, without an estimate for each of them.

A server of one worthwhile length, which it has now, gains its speed times the slope that other blocks have more than
its own. So the servers of the same blocks are kept in the order of their speeds, and the best of each span are merged.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import chain
from operator import sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.placement.servers import PlacedServer
    from llmnode.core.span import Span

    Rank = tuple[float, int]
    """A speed or an estimate, negative so that the best comes first, and the number of the server."""


class SpanRanks:
    """The movable servers, by the blocks that they serve now and by speed."""

    def __init__(
        self,
        servers: Sequence[PlacedServer],
        spans: Sequence[Span],
        lengths: Sequence[Sequence[int]],
        movable: Sequence[int],
    ) -> None:
        """`spans` are those of now, and `lengths` the worthwhile ones of each server, at least one if it may move."""
        self._servers, self._lengths = servers, lengths
        self._spans = [*spans]
        self._ranked: dict[tuple[int, int], list[Rank]] = {}
        self._others: set[int] = set()
        """Servers that could gain by another length too. Each needs an estimate of its own."""
        for number in movable:
            span = spans[number]
            if self._has_one_length(number, span):
                rank = -servers[number].speeds[-1], number
                self._ranked.setdefault((span.start, span.end), []).append(rank)
            else:
                self._others.add(number)
        for ranked in self._ranked.values():
            ranked.sort()

    def move(self, number: int, former: Span, span: Span) -> None:
        rank = -self._servers[number].speeds[-1], number
        if self._has_one_length(number, former):
            ranked = self._ranked[former.start, former.end]
            del ranked[bisect_left(ranked, rank)]
        else:
            self._others.remove(number)
        if self._has_one_length(number, span):
            insort(self._ranked.setdefault((span.start, span.end), []), rank)
        else:
            self._others.add(number)
        self._spans[number] = span

    def best(self, upto: Sequence[float], most: int) -> list[int]:
        """At most this many servers, by what a move gains at the slopes of the blocks, the first of equals first.

        `upto` has the sums of the slopes of all blocks before each.
        """
        lengths = {end - start for start, end in self._ranked}
        lengths.update(length for number in self._others for length in self._lengths[number])
        best = {length: max(map(sub, upto[length:], upto)) for length in lengths}
        heads: list[tuple[float, int, int, float, list[Rank]]] = []
        without: list[list[Rank]] = []
        for (start, end), ranked in self._ranked.items():
            if not ranked:
                continue
            slope = best[end - start] - (upto[end] - upto[start])
            if slope > 0.0:
                heads.append((ranked[0][0] * slope, ranked[0][1], 0, slope, ranked))
            else:
                without.append(ranked)  # no place is better than their own
        found = _merged(heads, most)
        if len(found) < most:
            numbers = (number for _, number in chain.from_iterable(without))
            found += [(0.0, number) for number in heapq.nsmallest(most - len(found), numbers)]
        if self._others:
            found += [(-self._gain(number, upto, best), number) for number in self._others]
            found.sort()
        return [number for _, number in found[:most]]

    def _has_one_length(self, number: int, span: Span) -> bool:
        own = self._lengths[number]
        return len(own) == 1 and own[0] == len(self._servers[number].speeds) == span.end - span.start

    def _gain(self, number: int, upto: Sequence[float], best: dict[int, float]) -> float:
        speeds, span = self._servers[number].speeds, self._spans[number]
        lost = speeds[span.end - span.start - 1] * (upto[span.end] - upto[span.start])
        return max(speeds[length - 1] * best[length] for length in self._lengths[number]) - lost


def _merged(heads: list[tuple[float, int, int, float, list[Rank]]], most: int) -> list[Rank]:
    """The first of all ranks, times the slopes of their spans. Each head is the first one of a span."""
    found: list[Rank] = []
    heapq.heapify(heads)
    while heads and len(found) < most:
        estimate, number, place, slope, ranked = heads[0]
        found.append((estimate, number))
        if place + 1 < len(ranked):
            speed, following = ranked[place + 1]
            heapq.heapreplace(heads, (speed * slope, following, place + 1, slope, ranked))
        else:
            heapq.heappop(heads)
    return found
