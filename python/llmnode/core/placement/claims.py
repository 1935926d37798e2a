"""The part of announcements that placement believes. Words alone must not keep other nodes away from blocks."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.placement.servers import PlacedServer, one_speed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.core.announcement import Announcement, Offer
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.placement.policy import RebalancePolicy
    from llmnode.core.span import Span


def of_weights(announcements: Iterable[Announcement], model: ModelInfo) -> list[Announcement]:
    """Those of the weights and adapter of `model`, in whatever precision.

    One that claims another number of blocks than they have is false: its span may have billions.
    """
    claimed = (model.digest, model.adapter, model.blocks)
    return [
        each
        for each in announcements
        if (each.offer.profile.model_digest, each.offer.profile.adapter, each.offer.blocks) == claimed
    ]


def counted(
    offers: Iterable[tuple[PeerId, Offer, float]], policy: RebalancePolicy, *, draining: bool = False
) -> list[PlacedServer]:
    """The servers that count, at the speeds that are believed. With each offer comes the age of its state in seconds.

    A peer that joins counts for `joins_within_s`, and so does one that moves, where it moves to. With `draining`, one
    that drains counts for `drains_within_s`: it may be about to move, without a word of it. No server is taken to hold
    another number of blocks than it does. The offers are of one model and profile.
    """
    patience_s = {
        PeerState.ONLINE: math.inf,
        PeerState.JOINING: policy.joins_within_s,
        PeerState.DRAINING: policy.drains_within_s if draining else 0.0,
    }
    offers = [
        (peer, _as_it_moves(offer) if age_s < policy.joins_within_s else offer, age_s) for peer, offer, age_s in offers
    ]
    counting = [(peer, offer) for peer, offer, age_s in offers if age_s < patience_s.get(offer.state, 0.0)]
    said = said_speeds([offer for _, offer in counting], policy)
    servers = [
        PlacedServer(
            peer,
            offer.span,
            one_speed(speed, len(offer.span)),
            online=offer.state is PeerState.ONLINE,
            movable=not offer.stays,
        )
        for (peer, offer), speed in zip(counting, said, strict=True)
    ]
    return believed(servers, policy)


def _as_it_moves(offer: Offer) -> Offer:
    """A peer that moves is like one that joins."""
    if offer.moves_to is None or offer.state not in (PeerState.ONLINE, PeerState.DRAINING):
        return offer
    return replace(offer, span=offer.moves_to, state=PeerState.JOINING, moves_to=None)


def before_moves(
    offers: Sequence[tuple[PeerId, Offer, float]], me: PeerId, wanted: Span
) -> list[tuple[PeerId, Offer, float]]:
    """The offers that count when `me`, which has begun to move to `wanted`, is about to leave its blocks.

    It counts where it still is. So does each other peer that moves to some of the same blocks, or away from some of
    the same, if its id is a later one. So of two nodes that would leave a block to each other, or close the same gap,
    the later one stays.
    """
    mine = next((offer.span for peer, offer, _ in offers if peer == me), wanted)

    def stays(peer: PeerId, offer: Offer) -> bool:
        meets = offer.moves_to is not None and (offer.moves_to.meets(wanted) or offer.span.meets(mine))
        return peer == me or (peer > me and meets)

    return [
        (peer, replace(offer, moves_to=None) if stays(peer, offer) else offer, age_s) for peer, offer, age_s in offers
    ]


def said_speeds(offers: Sequence[Offer], policy: RebalancePolicy) -> list[float]:
    """Tokens a second that each of the servers says it puts through its span; 0 if it has measured nothing.

    Beside servers that have measured their network, one that has measured its device alone counts as slow: nobody is to
    gain by not measuring.
    """
    said = [offer.speed.tokens_per_s or offer.speed_tokens_per_s for offer in offers]
    serving = [speed for offer, speed in zip(offers, said, strict=True) if offer.state is PeerState.ONLINE and speed]
    if not serving or not any(offer.speed.tokens_per_s for offer in offers):
        return said
    slow = statistics.median(serving) / policy.claim_limit
    return [
        speed if offer.speed.tokens_per_s or offer.state is not PeerState.ONLINE else min(speed, slow)
        for offer, speed in zip(offers, said, strict=True)
    ]


def believed(servers: Iterable[PlacedServer], policy: RebalancePolicy) -> list[PlacedServer]:
    """The same servers, none faster than `claim_limit` times the median of those that serve.

    A server that still loads counts at most at the median, and exactly there if it has not measured its speed yet.
    """
    servers = list(servers)
    usual = usual_speed([server.speed for server in servers if server.online])
    return [believed_of(server, usual, policy) for server in servers]


def usual_speed(serving: Sequence[float]) -> float:
    """The tokens a second that limit claims, where those that serve claim these."""
    return statistics.median(serving) if serving else 1.0


def believed_of(server: PlacedServer, usual: float, policy: RebalancePolicy) -> PlacedServer:
    """The same server at the speed that is believed, where servers claim this `usual` speed."""
    most = policy.claim_limit * usual if server.online else usual
    if server.speed <= 0.0 and not server.online:
        return replace(server, speeds=(most,) * len(server.speeds))
    return slowed(server, most)


def slowed(server: PlacedServer, most: float) -> PlacedServer:
    """The same server, with `most` tokens a second through its span if it has more."""
    if server.speed <= most:
        return server
    return replace(server, speeds=tuple(speed * most / server.speed for speed in server.speeds))
