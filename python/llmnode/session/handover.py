"""A session goes from process to process. Its hops outlive the link to the first, and the second takes them over."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import ConfigError, LocalProtocolError, PeerError, PeerRefused, PeerUnreachable
from llmnode.session.hop import SessionHop
from llmnode.session.saved import MOST_CONTACTS, SavedSession, pack, write
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmnode.core.ids import Epoch, PeerId
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.saved import SavedHop
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.session_terms import SessionTerms

log = logging.getLogger(__name__)


async def export(hops: SessionHops, token_ids: Sequence[int], path: Path) -> float:
    """Write the file, and return for how many seconds the servers keep the KV. Raises as `InferenceSession.export`."""
    if hops.terms.adapter is not None:
        raise ConfigError("a session with an adapter cannot be saved: the file would not have the adapter")
    if hops.terms.prompts:
        raise ConfigError("a session with deep prompts cannot be saved: the file would not have them")
    if hops.tools.finder is None:
        raise LocalProtocolError("a session that knows no other peers cannot be saved")
    hops.is_busy = True  # no other row moves it
    try:
        lease_s = await lease(hops)
        await write_file(hops.tools.finder, save(hops, token_ids), path)
    finally:
        hops.is_busy = False
    return lease_s


async def lease(hops: SessionHops) -> float:
    """Ask all hops to outlive the client, and return for how many seconds all do.

    A hop that does not is recovered later.
    """
    state = hops.state
    granted_s = [0.0] * len(state.hops)

    async def ask(index: int, hop: SessionHop) -> None:
        try:
            granted_s[index] = await hop.get_lease(state.epoch, state.step)
        except PeerError as error:
            log.info("no lease: %s", error)

    # A hop that has lost its place in the session, or logs nothing for the next one, would be of no use.
    if hops.terms.policy.recovery.upstream_logs and await _are_in_place(hops):
        async with trio.open_nursery() as nursery:
            for index, hop in enumerate(state.hops):
                if hop.failure is None:
                    nursery.start_soon(ask, index, hop)
    return min(granted_s)


async def _are_in_place(hops: SessionHops) -> bool:
    """Whether all hops stand at the session's position.

    If none is lost they go there first: after a move that failed, another row would do so only with its next step.
    """
    if not hops.state.is_settled and hops.state.lost is None:
        try:
            await hops.settle()
        except PeerError as error:
            log.info("no lease: %s", error)
    return hops.state.is_settled


def save(hops: SessionHops, token_ids: Sequence[int]) -> SavedSession:
    """The state of the session, for another process."""
    terms, state = hops.terms, hops.state
    model = terms.model
    return SavedSession(
        model.name,
        model.profile,
        model.blocks,
        model.hidden_size,
        terms.codec,
        terms.max_length,
        state.position,
        state.epoch,
        tuple(state.hops[0].inputs.pieces(state.position)),
        tuple(hop.saved for hop in state.hops),
        tuple(token_ids),
    )


async def write_file(finder: PeerFinder, saved: SavedSession, path: Path) -> None:
    """Write the session to a file, with our key and peers that we know. Raises ConfigError."""
    known = {each.peer: each.addresses for each in finder.swarm.view.announcements()}
    hops = [address for hop in saved.hops for address in known.pop(hop.peer, ())]
    others = [address for addresses in known.values() for address in addresses]
    contacts = dict.fromkeys([*hops, *finder.swarm.contacts, *others])
    key = finder.pool.network.key
    complete = replace(saved, contacts=tuple(contacts)[:MOST_CONTACTS], key=key)
    await finder.run(lambda: write(path, pack(complete)))


async def reach_hops(finder: PeerFinder, saved: SavedSession) -> Mapping[PeerId, PeerConnection]:
    """Connections to the hops that can be reached, at the addresses that they announce or that were saved.

    There are none to peers that this client was told to leave out.
    """
    known = {each.peer: each.addresses for each in finder.swarm.view.of_model(finder.model.digest)}
    connections: dict[PeerId, PeerConnection] = {}

    async def reach(peer: PeerId) -> None:
        had = [address for address in saved.contacts if peer_of(address) == peer]
        try:
            with trio.fail_after(finder.policy.route.connect_timeout_s):
                connections[peer] = await finder.pool.connect(known.get(peer) or had)
        except (PeerError, ConfigError, trio.TooSlowError) as error:
            log.info("cannot reach peer=%s, which had the session: %s", peer, error)
            finder.report(PeerUnreachable("cannot be reached", peer=peer))

    async with trio.open_nursery() as nursery:
        for peer in dict.fromkeys(each.peer for each in saved.hops if each.session is not None):
            if finder.policy.route.may_use(peer):
                nursery.start_soon(reach, peer)
    return connections


async def take_over(
    hops: SessionHops, saved: SavedSession, connections: Mapping[PeerId, PeerConnection], finder: PeerFinder
) -> None:
    """Have `hops` stand where `saved` does. Those that are not there any more are lost."""
    asked_in = hops.state.resume(saved.epoch, saved.position)
    found = [
        SessionHop(Hop(each.peer, each.span), connections.get(each.peer), hops.terms, each.session, each.nonce)
        for each in saved.hops
    ]
    async with trio.open_nursery() as nursery:
        for hop, each in zip(found, saved.hops, strict=True):
            nursery.start_soon(_take_over, hop, each, asked_in, saved, finder)
    hops.state.hops = _join_gaps(hops.terms, found)
    for payload, length in saved.log:
        hops.state.hops[0].inputs.append(payload, length)


async def _take_over(hop: SessionHop, kept: SavedHop, asked_in: Epoch, saved: SavedSession, finder: PeerFinder) -> None:
    """An error is the hop's failure."""
    if kept.session is None or not hop.terms.policy.recovery.upstream_logs:
        hop.blame(PeerRefused(RefusalCode.UNKNOWN_SESSION, "has not kept the session"))
    if hop.failure is not None:
        return
    try:
        await hop.take_over(asked_in, saved.epoch, saved.position)
    except PeerError as error:
        log.info("not taken over: %s", error)
        await hop.close()
        finder.report(error)


def _join_gaps(terms: SessionTerms, hops: Sequence[SessionHop]) -> list[SessionHop]:
    """The hops, with one lost hop for all lost ones that follow each other: one replay replaces them.

    It is no peer's failure: a peer that does not have the session any more may well take its place.
    """
    joined: list[SessionHop] = []
    for is_lost, group in groupby(hops, lambda hop: hop.failure is not None):
        members = list(group)
        if is_lost:
            span = Span(members[0].hop.span.start, members[-1].hop.span.end)
            gap = SessionHop(Hop(members[0].hop.peer, span), None, terms)
            gap.failure = PeerUnreachable("the session that was saved is not there any more", span=span)
            members = [gap]
        joined += members
    return joined
