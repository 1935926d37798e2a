"""A session goes from process to process: its hops are asked to outlive the one, and are taken over by the other."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import TYPE_CHECKING

import trio

from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, PeerUnreachable
from llmnode.session.hop import SessionHop
from llmnode.session.saved import SavedSession
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import Epoch, PeerId
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.saved import SavedHop
    from llmnode.swarm.peer_connection import PeerConnection

log = logging.getLogger(__name__)


async def lease(line: SessionHops) -> float:
    """Ask all hops to outlive us, for as long as is returned. Who does not, or has failed, is recovered later."""
    granted_s = [0.0] * len(line.hops)

    async def ask(index: int, hop: SessionHop) -> None:
        try:
            granted_s[index] = await hop.lease(line.epoch, line.step)
        except PeerError as error:
            log.info("no lease: %s", error)

    # Who has lost its place in the session, or logs nothing for the next hop, would be of no use.
    if line.is_settled and line.policy.recovery.upstream_logs:
        async with trio.open_nursery() as nursery:
            for index, hop in enumerate(line.hops):
                if hop.failure is None:
                    nursery.start_soon(ask, index, hop)
    return min(granted_s)


def save(line: SessionHops, token_ids: Sequence[int]) -> SavedSession:
    """What another process needs to know of it, as it stands now."""
    model = line.terms.model
    return SavedSession(
        model.name,
        model.profile,
        model.blocks,
        model.hidden_size,
        line.terms.codec,
        line.terms.max_length,
        line.position,
        line.epoch,
        tuple(line.hops[0].inputs.pieces(line.position)),
        tuple(hop.saved for hop in line.hops),
        tuple(token_ids),
    )


async def take_over(
    line: SessionHops, saved: SavedSession, connections: Mapping[PeerId, PeerConnection], finder: PeerFinder
) -> None:
    """Have `line` stand where `saved` does, but for hops that are not there any more: they are lost."""
    line.position, line.epoch, line.is_settled = saved.position, saved.epoch, False
    asked_in = line.begin_epoch()
    hops = [
        SessionHop(Hop(each.peer, each.span), connections.get(each.peer), line.terms, each.session)
        for each in saved.hops
    ]
    async with trio.open_nursery() as nursery:
        for hop, each in zip(hops, saved.hops, strict=True):
            nursery.start_soon(_take_over, line, hop, each, asked_in, saved, finder)
    line.hops = _gaps_joined(line, hops)
    for payload, length in saved.log:
        line.hops[0].inputs.append(payload, length)


async def _take_over(
    line: SessionHops, hop: SessionHop, each: SavedHop, asked_in: Epoch, saved: SavedSession, finder: PeerFinder
) -> None:
    """What fails is the hop's failure."""
    if each.session is None or not line.policy.recovery.upstream_logs:
        hop.blame(PeerRefused(RefusalCode.UNKNOWN_SESSION, "has not kept the session"))
    if hop.failure is not None:
        return
    try:
        await hop.take_over(asked_in, saved.epoch, saved.position)
    except PeerError as error:
        log.info("not taken over: %s", error)
        await hop.close()
        finder.report(error)


def _gaps_joined(line: SessionHops, hops: Sequence[SessionHop]) -> list[SessionHop]:
    """With one lost hop for all that follow each other: they are replaced by one replay.

    Nobody's failure: who does not have the session any more may well take its place.
    """
    joined: list[SessionHop] = []
    for is_lost, group in groupby(hops, lambda hop: hop.failure is not None):
        members = list(group)
        if is_lost:
            span = Span(members[0].hop.span.start, members[-1].hop.span.end)
            gap = SessionHop(Hop(members[0].hop.peer, span), None, line.terms)
            gap.failure = PeerUnreachable("the session that was saved is not there any more", span=span)
            members = [gap]
        joined += members
    return joined
