"""Peers that are honest, and one that lies, for tests of what a client believes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.peers.standing import Candidate
from llmnode.core.policy import StandingPolicy
from llmnode.core.route import Hop, find_route
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.peers.standing import DecodeTime, Standing
    from llmnode.core.route import HopCost

POLICY = StandingPolicy()
HONEST_S = 0.0004
BLOCKS = 30
LIAR = PeerId("liar")
HONEST = [PeerId(f"honest {number}") for number in range(10)]


def candidates(*liars: PeerId, sessions: int = 0) -> list[Candidate]:
    honest = [Candidate(each, HONEST_S, 0) for each in HONEST]
    return [*honest, *(Candidate(each, 1e-6, sessions) for each in liars)]


def total_s(cost: HopCost, blocks: int = BLOCKS) -> float:
    return cost.hop_s + blocks * cost.block_s


def serve(standing: Standing, peer: PeerId, took_s: float, now_s: float = 0.0, beside: float = 0.0) -> None:
    for _ in range(POLICY.proven_positions):
        standing.note_served(peer, BLOCKS, 1, took_s, now_s, beside)


def first_choice(standing: Standing, offers: Sequence[Candidate], now_s: float = 0.0) -> PeerId:
    costs = standing.costs(offers, now_s)
    return find_route(BLOCKS, [Hop(each.peer, Span(0, BLOCKS)) for each in offers], costs)[0].peer


def company(peer: PeerId, decode: DecodeTime, own: float = 0.0) -> Candidate:
    """The peer, as it is for a session beside this number of the client's own ones."""
    return Candidate(peer, decode.beside_s(own), 0, decode=decode)
