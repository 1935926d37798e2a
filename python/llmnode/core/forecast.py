"""A forecast for a swarm: the throughput of many sessions, and the time of one, by the functions that servers and
clients decide with.

A session takes the route that a client without any experience would take. A step goes from the client to the first hop,
from hop to hop, and back; each hop computes it and sends it on. Knows no clock and no network: all times are measured
ones that are told.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmnode.core.peers.standing import Standing, candidate_of, unmeasured_as_slow
from llmnode.core.peers.ways import believed_ways
from llmnode.core.placement.claims import counted
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import throughput
from llmnode.core.policy import StandingPolicy
from llmnode.core.route import Hop, find_route

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo


@dataclass(frozen=True, slots=True)
class ClientPlace:
    """A client: its round trips to servers, its own time for each token, and its upload. Times are in seconds."""

    round_trips_s: Mapping[PeerId, float]
    token_s: float = 0.0
    """Embedding, head and choice."""
    upload_bytes_per_s: float = 0.0
    """0 if it is not measured: then what it sends takes no time."""

    def nearer(self, share: float) -> ClientPlace:
        """The same client with this share of its round trips."""
        return replace(self, round_trips_s={peer: share * each for peer, each in self.round_trips_s.items()})


@dataclass(frozen=True, slots=True)
class HopForecast:
    """The parts of a session's time at one hop, in seconds."""

    hop: Hop
    way_s: float
    """To it from the hop before, or from the client."""
    send_s: float
    """The sending of one hidden state to it."""
    compute_s: float
    """One token through its blocks."""
    prompt_send_s: float
    prompt_s: float
    """The whole prompt through its blocks."""


@dataclass(frozen=True, slots=True)
class SessionForecast:
    """One session that is alone with its servers, after `prompt_tokens`."""

    hops: tuple[HopForecast, ...]
    back_s: float
    """From the last hop to the client, with the sending of a hidden state."""
    client_s: float
    open_s: float
    prompt_tokens: int

    @property
    def compute_s(self) -> float:
        """The part of a step in which servers compute."""
        return sum(each.compute_s for each in self.hops)

    @property
    def ways_s(self) -> float:
        """The part of a step in which it is on its way."""
        return sum(each.way_s for each in self.hops) + self.back_s

    @property
    def send_s(self) -> float:
        """The part of a step in which lines are busy with it."""
        return sum(each.send_s for each in self.hops)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.ways_s + self.send_s + self.client_s

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s

    @property
    def first_token_s(self) -> float:
        """From the question to the first token, over connections that are open."""
        prompt = sum(each.prompt_s + each.prompt_send_s for each in self.hops)
        return self.open_s + prompt + self.ways_s + self.client_s


@dataclass(frozen=True, slots=True)
class SwarmForecast:
    """A swarm of servers of one model: tokens/s of many sessions, and one session. None while blocks are missing."""

    tokens_per_s: float
    session: SessionForecast | None = field(default=None)


def forecast(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, prompt_tokens: int
) -> SwarmForecast:
    """The throughput of the `servers`, all of `model` in one precision and online, and a session of `client`.

    The prompt of the session has this number of `prompt_tokens`.
    """
    offers = [(each.peer, each.offer, 0.0) for each in servers]
    rate = throughput(model.blocks, counted(offers, RebalancePolicy())) if servers else 0.0
    return SwarmForecast(rate, forecast_session(model, servers, client, prompt_tokens) if rate > 0 else None)


def forecast_session(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, prompt_tokens: int
) -> SessionForecast:
    """One session of the `client` over `servers` of `model`, on the route that it would take. Raises NoRoute.

    It begins with a prompt of `prompt_tokens`.
    """
    row_bytes, trips = model.row_bytes, client.round_trips_s
    candidates = [candidate_of(each, row_bytes, trips.get(each.peer)) for each in servers]
    costs = Standing(StandingPolicy()).costs(candidates, 0.0)
    ways = believed_ways(servers, trips)
    held = [Hop(each.peer, each.offer.span) for each in servers]
    route = find_route(model.blocks, held, costs, ways)
    said = {each.peer: each for each in unmeasured_as_slow(candidates)}
    announced = {each.peer: each.offer for each in servers}
    half_s = {hop.peer: (said[hop.peer].round_trip_s or 0.0) / 2 for hop in route}
    hops: list[HopForecast] = []
    upload_s = row_bytes / client.upload_bytes_per_s if client.upload_bytes_per_s else 0.0
    for former, hop in zip((None, *route), route, strict=False):
        by_client_s = half_s[hop.peer] + (half_s[former.peer] if former is not None else 0.0)
        way_s = by_client_s if former is None else ways.get((former.peer, hop.peer), by_client_s)
        send_s = upload_s if former is None else said[former.peer].said_upload_s
        compute_s = len(hop.span) * said[hop.peer].said_block_s
        position_s = announced[hop.peer].speed.prefill_s or said[hop.peer].said_block_s
        prompt_s = max(compute_s, prompt_tokens * len(hop.span) * position_s)
        hops.append(HopForecast(hop, way_s, send_s, compute_s, prompt_tokens * send_s, prompt_s))
    last = route[-1].peer
    open_s = 2 * max(2 * each for each in half_s.values())  # OPEN, and NEIGHBOURS, at all hops at once
    return SessionForecast(tuple(hops), half_s[last] + said[last].said_upload_s, client.token_s, open_s, prompt_tokens)
