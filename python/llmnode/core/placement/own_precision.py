"""The precision of a node that is free to choose one: where the swarm lacks blocks, or where the node adds most speed.

A session stays within one precision, so the servers of each precision are a pipeline of their own. The rule is
`choose_own`. Knows neither devices nor connections: it is told how fast the device is, and which peers have answered.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.model import DTYPES, EXACT, KV_DTYPES, QUANTS
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.precisions import BACKERS, NAMED
from llmnode.core.placement.servers import PlacedServer, block_speeds, one_speed, throughput
from llmnode.core.route import uncovered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmnode.core.model import Precision
    from llmnode.core.span import Span

SLOW_PACE = 0.2
"""A device is slow in a precision if it has less than this share of its speed in float32."""
NEAR = 0.9
"""A gain of this share of the largest one counts as equal: speeds are estimates."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A precision in which a device can compute blocks of the model."""

    precision: Precision
    blocks: int
    """The number of blocks that the node would hold."""
    pace: float
    """The speed of a block. float32 on the same device has 1."""
    is_emulated: bool = False
    """The device has no instructions for it. Its usual pace is a guess."""
    is_compared: bool = True
    """False if the pace was measured, and nothing tells that of float32. It does not count as slow then."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """One precision, as it would be with this node."""

    precision: Precision
    span: Span
    """The blocks that the node would serve."""
    servers: int
    missing: tuple[Span, ...]
    """Blocks that nobody serves or loads in it."""
    still_missing: tuple[Span, ...]
    """The same, once this node serves its blocks."""
    answering: int
    """Servers that have answered."""
    loading: int
    """Servers that still load: nobody asks them. A stranger may have invented them."""
    groups: int
    """Those that have answered are in this many address groups, or in more, for each block left to others."""
    gain_tokens_per_s: float
    """The greater one of two gains in throughput: now, and once servers have moved and its work is spread evenly."""
    is_slow: bool
    """The device is slow in it, see `SLOW_PACE`."""

    @property
    def is_whole(self) -> bool:
        """Whether servers of all blocks are announced, with this node."""
        return not self.still_missing

    @property
    def is_usable(self) -> bool:
        """Whether sessions can be opened, as far as is known: somebody answers, if there are others."""
        return self.is_whole and (self.answering > 0 or not self.servers)

    @property
    def closes(self) -> bool:
        """Whether this node makes whole what others have begun."""
        return self.is_whole and bool(self.missing) and self.servers > 0


def choose_own(prospects: Sequence[Prospect]) -> Prospect:
    """The precision in which the node should serve. These questions decide, in this order:

    1. Can sessions be opened in it, once this node serves? If others serve in it, does one of them answer?
    2. If others serve in it: do servers in two address groups answer for each block left to others, where those
       of another precision do? The word of one stranger draws nobody away from there, to a gap no more than to speed.
    3. Is the device not slow in it?
    4. Does anybody serve in it already? A precision of its own would split the swarm.
    5. Does this node close its gap, and does somebody answer for each other block? Nobody can use it otherwise.
    6. Where does the throughput grow most? Gains within 10 % are equal. The precision nearest to exact comes first
       then, next one that was whole before, next the first by name.

    If sessions can be opened in none, the node helps those that have begun: of the precisions with servers that answer,
    and in which its device is not slow, it takes the one that lacks fewest blocks then. If nobody answers in any, it
    takes servers that still load at their word: all nodes of a new swarm do.
    """
    backed = [each.groups for each in prospects if each.servers and each.is_usable]
    backers = min(BACKERS, max(backed, default=0))
    best = min(_rank(each, backers) for each in prospects)
    equal = [each for each in prospects if _rank(each, backers) == best]
    most = max(each.gain_tokens_per_s for each in equal)
    near = [each for each in equal if each.gain_tokens_per_s >= NEAR * most]
    return min(near, key=lambda each: (_loss(each.precision), len(each.missing), each.precision.name))


def _rank(each: Prospect, backers: int) -> tuple[int, ...]:
    """The answers to questions 1 to 5, the best first."""
    is_new = each.servers == 0
    if not each.is_usable:
        standing = 0 if each.answering else 1 if each.loading else 2 if is_new else 3
        return 1, standing, each.is_slow, sum(map(len, each.still_missing))
    is_doubted = not is_new and each.groups < backers
    return 0, is_doubted, each.is_slow, is_new, not (each.closes and each.groups)


def _loss(precision: Precision) -> tuple[int, int, int]:
    """How far it is from exact. Rounded weights cost more than all else, and 16 bits least."""
    return QUANTS.index(precision.quant), KV_DTYPES.index(precision.kv_dtype), DTYPES.index(precision.dtype)


def prospects_of(
    blocks: int,
    candidates: Iterable[Candidate],
    servers: Mapping[Precision, Sequence[PlacedServer]],
    met: Mapping[PeerId, str],
    unit_tokens_per_s: float,
    chosen: Span | None = None,
) -> list[Prospect]:
    """The prospects of a node, in each of its candidates, for a model of `blocks` blocks.

    `servers` are those that count, at the speeds that are believed. `met` are the address groups of those that have
    answered. A block of pace 1 puts `unit_tokens_per_s` through. The owner may have `chosen` the blocks; else the node
    takes those that the swarm needs most.
    """
    return [
        _prospect(blocks, each, servers.get(each.precision, ()), met, unit_tokens_per_s, chosen) for each in candidates
    ]


def _prospect(
    blocks: int,
    candidate: Candidate,
    servers: Sequence[PlacedServer],
    met: Mapping[PeerId, str],
    unit_tokens_per_s: float,
    chosen: Span | None,
) -> Prospect:
    span = chosen or choose_span(candidate.blocks, block_speeds(blocks, servers))
    speed = candidate.pace * unit_tokens_per_s / len(span)
    own = PlacedServer(PeerId(""), span, one_speed(speed, len(span)))
    spans = [each.span for each in servers]
    now = throughput(blocks, [*servers, own]) - throughput(blocks, servers)
    return Prospect(
        candidate.precision,
        span,
        len(servers),
        tuple(uncovered(blocks, spans)),
        tuple(uncovered(blocks, [*spans, span])),
        sum(each.peer in met for each in servers),
        sum(not each.online for each in servers),
        _groups(blocks, span, servers, met),
        max(now, speed * len(span) / blocks),
        candidate.pace < SLOW_PACE and candidate.is_compared,
    )


def _groups(blocks: int, span: Span, servers: Sequence[PlacedServer], met: Mapping[PeerId, str]) -> int:
    """See `Prospect.groups`. A node that leaves no block to others asks for all that they hold."""
    held: dict[int, set[str]] = {}
    for server in servers:
        group = met.get(server.peer)
        for block in range(server.span.start, min(server.span.end, blocks)):
            groups = held.setdefault(block, set())
            if group is not None:
                groups.add(group)
    left = [groups for block, groups in held.items() if not span.start <= block < span.end]
    return min(map(len, left or held.values()), default=0)


def paced(
    candidates: Sequence[Candidate],
    measured: Mapping[Precision, float],
    servers: Iterable[PlacedServer],
) -> tuple[list[Candidate], float]:
    """The candidates at their `measured` speeds, and the tokens a second of one block at pace 1, that of float32.

    `measured` has tokens a second of one block, for those precisions in which this device was measured before. Without
    float32, the one whose usual pace is nearest to it tells, unless it is emulated. Else the best candidate is taken to
    be as fast as the usual one of `servers`, and float32 to be no slower than what is emulated.
    """
    rates = {each.precision: rate for each in candidates if (rate := measured.get(each.precision, 0.0))}
    telling = [each for each in candidates if each.precision in rates and not each.is_emulated]
    unit = measured.get(EXACT, 0.0)
    if not unit and telling:
        nearest = min(telling, key=lambda each: (abs(math.log(each.pace)), each.precision.name))
        unit = rates[nearest.precision] / nearest.pace
    is_compared = unit > 0.0
    if not is_compared:
        fastest = max((each.pace for each in candidates), default=1.0)
        others = [each.speed * len(each.span) for each in servers if each.online and each.speed]
        unit = max([(statistics.median(others) if others else 1.0) / fastest, *rates.values()])
    at_rates = [
        replace(each, pace=rates[each.precision] / unit, is_compared=is_compared) if each.precision in rates else each
        for each in candidates
    ]
    return at_rates, unit


def describe_own(chosen: Prospect, prospects: Sequence[Prospect]) -> str:
    """One line for the user: the precision, and why."""
    name = chosen.precision.name
    if not chosen.servers:
        why = "nobody serves the model in it, and it suits this device"
    elif chosen.closes:
        why = f"the swarm lacks blocks {_spans(chosen.missing)} in it, and this node serves them"
    elif not chosen.is_whole:
        why = f"no precision is served whole, and this one lacks blocks {_spans(chosen.still_missing)} with this node"
    else:
        number = "one server has" if chosen.servers == 1 else f"{chosen.servers} servers have"
        why = f"{number} the whole model in it, and this node may add up to {chosen.gain_tokens_per_s:.3g} tokens/s"
    others = [each for each in prospects if each is not chosen and each.servers]
    beside = "".join(f"; {_why_not(each, chosen)}" for each in others[:NAMED])
    return f"{name}: {why}{', though this device is slow in it' if chosen.is_slow else ''}{beside}"


def _why_not(other: Prospect, chosen: Prospect) -> str:
    name = other.precision.name
    if not other.is_whole:
        return f"{name} lacks blocks {_spans(other.still_missing)} even with this node"
    if not other.answering or other.groups < min(BACKERS, chosen.groups):
        return f"too few servers of {name} answer"
    if other.is_slow:
        return f"this device is slow in {name}"
    if chosen.closes and not other.closes:
        return f"{name} is whole without it"
    return f"in {name} it would add {other.gain_tokens_per_s:.3g}"


def _spans(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans))
