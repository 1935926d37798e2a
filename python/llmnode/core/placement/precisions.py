"""The precisions in which a swarm serves one model, the best first: a client need not name one.

Exact comes first, then the one with the most throughput: more clients find a place there. One stranger alone does not
decide: if servers of two address groups have each block in some precision, one that a single group has comes later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.model import Precision, PrecisionWish
from llmnode.core.peers.whereabouts import groups_of
from llmnode.core.placement.claims import believed, of_weights, said_speeds
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import PlacedServer, one_speed, throughput
from llmnode.core.route import uncovered

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span

NAMED = 4
"""A message tells of at most this many precisions."""
BACKERS = 2
"""Servers of this many address groups for each block are enough."""


@dataclass(frozen=True, slots=True)
class ServedPrecision:
    """A precision in which at least one server has blocks of the model."""

    precision: Precision
    servers: int
    missing: tuple[Span, ...]
    """Blocks that nobody serves in it."""
    tokens_per_s: float
    """The throughput that its servers claim, as far as that is believed; 0 while blocks are missing or unmeasured."""
    groups: int
    """Each block has servers that were met in this many address groups, or in more."""

    @property
    def is_whole(self) -> bool:
        """Whether a session can be opened in it."""
        return not self.missing


def served_precisions(
    model: ModelInfo,
    announcements: Iterable[Announcement],
    wish: PrecisionWish,
    met: Mapping[PeerId, str],
) -> list[ServedPrecision]:
    """Every precision that `wish` allows and this version can compute in, in the order in which to try them.

    Those that are served whole come first, then those that lack fewer blocks. One that a single address group serves
    comes after those that several serve. Among equals, the one nearest to exact comes first, then those of more
    throughput. `announcements` are those that count. `met` are the address groups of the peers that have answered: the
    others have no vote. The precision of `model` does not matter.
    """
    of_model = [each for each in of_weights(announcements, model) if each.offer.profile.precision.is_known]
    # All together: a claim is limited by what others claim, whatever precision it is for.
    policy = RebalancePolicy()
    said = said_speeds([each.offer for each in of_model], policy)
    servers = {each.peer: each for each in believed(map(_server, of_model, said), policy)}
    by_precision: dict[Precision, list[PlacedServer]] = {}
    for each in of_model:
        if wish.allows(each.offer.profile.precision):
            by_precision.setdefault(each.offer.profile.precision, []).append(servers[each.peer])
    found = [_served(model.blocks, precision, own, met) for precision, own in by_precision.items()]
    backers = min(BACKERS, max((each.groups for each in found if each.is_whole), default=0))
    return sorted(found, key=lambda each: _order(each, wish, backers))


def backing_servers(
    announcements: Sequence[Announcement],
    backed: Mapping[PeerId, str],
    met: Mapping[PeerId, str],
    asked: Collection[PeerId] = (),
    late: Collection[PeerId] = (),
) -> list[Announcement]:
    """Servers to ask whether they answer: in two address groups for each block, as they say, besides those `backed`.

    `announcements` are of one precision, in the order in which to ask. Until it is known whether a server is there, it
    counts for each block in all groups that it claims: those that were `asked`, too. Those that are `late` to answer
    count no more, and for each of them one more is asked for its blocks. `met` are the groups of known peers.
    """
    taken: dict[int, set[str]] = {}
    backers: Counter[int] = Counter()
    wanted: Counter[int] = Counter()

    def count(server: Announcement, groups: frozenset[str]) -> None:
        for block in _blocks(server):
            backers[block] += taken.setdefault(block, set()).isdisjoint(groups)
            taken[block] |= groups

    for each in announcements:
        if each.peer in backed:
            count(each, groups_of(each, backed))
    for each in announcements:
        if each.peer in late:
            wanted.update(block for block in _blocks(each) if backers[block] < BACKERS)
    for each in announcements:
        if each.peer in asked:
            count(each, groups_of(each, met))
    blocks = max((each.offer.span.end for each in announcements), default=0)
    lacking = {block for block in range(blocks) if backers[block] < BACKERS + wanted[block]}
    known = {*backed, *asked, *late}
    chosen: list[Announcement] = []
    for each in announcements:
        if not lacking:
            break
        if each.peer in known or not each.addresses:
            continue
        groups = groups_of(each, met)
        if any(block in lacking and groups.isdisjoint(taken.get(block, ())) for block in _blocks(each)):
            chosen.append(each)
            count(each, groups)
            lacking -= {block for block in _blocks(each) if backers[block] >= BACKERS + wanted[block]}
    return chosen


def _blocks(server: Announcement) -> range:
    return range(server.offer.span.start, server.offer.span.end)


def _order(each: ServedPrecision, wish: PrecisionWish, backers: int) -> tuple[object, ...]:
    return (
        not each.is_whole,
        sum(map(len, each.missing)),
        each.is_whole and each.groups < backers,
        each.precision != wish.nearest,
        -each.tokens_per_s,
        each.precision.name,
    )


def _served(
    blocks: int, precision: Precision, servers: Sequence[PlacedServer], met: Mapping[PeerId, str]
) -> ServedPrecision:
    missing = uncovered(blocks, [each.span for each in servers])
    at_blocks: list[set[str]] = [set() for _ in range(blocks)]
    for server in servers:
        if (group := met.get(server.peer)) is not None:
            for block in range(server.span.start, min(server.span.end, blocks)):
                at_blocks[block].add(group)
    least = min(map(len, at_blocks), default=0)
    return ServedPrecision(precision, len(servers), tuple(missing), throughput(blocks, servers), least)


def _server(announcement: Announcement, tokens_per_s: float) -> PlacedServer:
    span = announcement.offer.span
    return PlacedServer(announcement.peer, span, one_speed(tokens_per_s, len(span)))


def describe_choice(
    chosen: ServedPrecision,
    all_served: Sequence[ServedPrecision],
    wish: PrecisionWish,
    failed: Mapping[Precision, str] | None = None,
) -> str:
    """One line for the user: which precision was found, and why not one nearer to exact. `failed` have been tried."""
    text = f"{chosen.precision.name}: {_count(chosen.servers)} the whole model in it"
    if chosen.precision == wish.nearest:
        return text
    exact = next((each for each in all_served if each.precision == wish.nearest), None)
    if exact is None:
        return f"{text}, and nobody serves {wish.nearest.name}"
    if failed and exact.precision in failed:
        return f"{text}, and {exact.precision.name}, which is announced, did not work: {failed[exact.precision]}"
    if exact.is_whole and exact.groups < min(BACKERS, chosen.groups):
        few = f"too few servers of {exact.precision.name} answer at different addresses"
        return f"{text}, and {few}: name it as the dtype if you trust them"
    if exact.is_whole:
        return f"{text}, and no way through the servers of {wish.nearest.name} was found"
    return f"{text}, and {wish.nearest.name} lacks blocks {_spans(exact.missing)}"


def describe_gaps(served: Sequence[ServedPrecision]) -> str:
    """For the user, the blocks that each precision lacks, where none is served whole."""
    lacks = [f"{each.precision.name} lacks blocks {_spans(each.missing)}" for each in served[:NAMED]]
    return f"{'; '.join(lacks)}, and a session needs all blocks in one precision"


def _count(servers: int) -> str:
    return "one server has" if servers == 1 else f"{servers} servers have"


def _spans(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans))
