"""A forecast for a swarm: the throughput of many sessions, and the time of one, by the functions that servers and
clients decide with.

A session takes the route that a client without any experience would take. A step goes from the client to the first hop,
from hop to hop, and back; each hop computes it and sends it on. Knows no clock and no network: all times are measured
ones that are told. It leaves out what servers announce as their load, which is over in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmnode.core.links.packing import usual_share
from llmnode.core.many_sessions import RouteSessions, SharedServer, many_sessions_tokens_per_s
from llmnode.core.peers.standing import OwnUse, Standing, candidate_of, settled_costs, unmeasured_as_slow
from llmnode.core.peers.ways import believed_ways
from llmnode.core.placement.claims import counted
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.policy import ClientPolicy, StandingPolicy
from llmnode.core.route import find_route, replaceable, uncovered
from llmnode.core.speed import PROMPT_POSITIONS, SHARED_SESSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.announcement import Announcement, Offer
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.peers.standing import Candidate
    from llmnode.core.route import Hop, Route

NO_SESSIONS: Mapping[PeerId, int] = {}
CHOICES = 64
"""Many sessions choose their routes in this number of turns at most."""


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
    prompt_back_s: float
    """The sending of the hidden states of the whole prompt to the client."""
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
        """From the question to the first token, over connections that are open.

        While one chunk of a long prompt is at a line or a hop, the next one is at that before it.
        """
        parts = [part for each in self.hops for part in (each.prompt_send_s, each.prompt_s)] + [self.prompt_back_s]
        chunks = -(-self.prompt_tokens // ClientPolicy().chunk_tokens)
        prompt_s = (sum(parts) + (chunks - 1) * max(parts)) / chunks
        return self.open_s + prompt_s + self.ways_s + self.client_s


@dataclass(frozen=True, slots=True)
class SwarmForecast:
    """A swarm of servers of one model, and one session through it. None while blocks are missing."""

    tokens_per_s: float
    """The sum of `sessions` that decode at once, at the client's place."""
    sessions: int
    session: SessionForecast | None = field(default=None)


def forecast(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, prompt_tokens: int
) -> SwarmForecast:
    """The throughput of the `servers`, all of `model` in one precision and online, and a session of `client`.

    It is that of `SHARED_SESSIONS` for each server. The prompt of the one session has this number of `prompt_tokens`.
    """
    sessions = SHARED_SESSIONS * len(servers)
    if uncovered(model.blocks, [each.offer.span for each in servers]):
        return SwarmForecast(0.0, sessions)
    rate = _many_tokens_per_s(model, servers, client, sessions)
    return SwarmForecast(rate, sessions, forecast_session(model, servers, client, prompt_tokens))


def _many_tokens_per_s(model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, sessions: int) -> float:
    """The sum of this number of `sessions` of `client`, over those of the `servers` that have measured something."""
    shared = _shared(servers)
    measured = [each for each in servers if each.peer in shared]
    if uncovered(model.blocks, [each.offer.span for each in measured]):
        return 0.0
    places = {each.peer: place for place, each in enumerate(measured)}
    routes: list[RouteSessions] = []
    for route, number in forecast_routes(model, measured, client, sessions).items():
        alone = forecast_route(model, measured, client, 1, route)
        visits = [(places[hop.peer], len(hop.span) / len(measured[places[hop.peer]].offer.span)) for hop in route]
        routes.append(RouteSessions(number, alone.step_s - alone.compute_s, tuple(visits)))
    return many_sessions_tokens_per_s([shared[each.peer] for each in measured], routes)


def forecast_routes(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, sessions: int
) -> Mapping[Route, int]:
    """The routes over `servers` of `model` that this number of `sessions` of `client` take, and how many take each.

    The servers have proved themselves to the client, and each session is opened beside those before it. Raises NoRoute.
    """
    held, ways = [each.hop for each in servers], believed_ways(servers, client.round_trips_s)
    routes: Counter[Route] = Counter()
    taken: Counter[PeerId] = Counter()
    together = -(-sessions // CHOICES)
    for first in range(0, sessions, together):
        number = min(together, sessions - first)
        costs = settled_costs(_candidates(model, servers, client, taken))
        route = find_route(model.blocks, held, costs, ways)
        routes[route] += number
        taken.update({hop.peer: number for hop in route})
    return routes


def _candidates(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, taken: Mapping[PeerId, int] = NO_SESSIONS
) -> list[Candidate]:
    """The `servers` as `client` sees them, while they have those sessions that it has `taken` there, and no others."""
    return [
        candidate_of(
            replace(each, offer=replace(each.offer, load=None)),
            model.row_bytes,
            client.round_trips_s.get(each.peer),
            OwnUse(taken.get(each.peer, 0)),
        )
        for each in servers
    ]


def _shared(servers: Sequence[Announcement]) -> dict[PeerId, SharedServer]:
    """Their forwards by what they announce of one session and of `SHARED_SESSIONS`, as far as placement believes it.

    Without those that have measured nothing.
    """
    placed = {
        each.peer: each for each in counted([(each.peer, each.offer, 0.0) for each in servers], RebalancePolicy())
    }
    found: dict[PeerId, SharedServer] = {}
    for peer, offer, rate in ((each.peer, each.offer, placed[each.peer].speed) for each in servers):
        if rate:
            batch_s = SHARED_SESSIONS / rate
            said_s = offer.block_us * len(offer.span) / 1e6 or 1 / rate
            alone_s = min(max(said_s, batch_s / SHARED_SESSIONS), batch_s)
            found[peer] = SharedServer(alone_s, (batch_s - alone_s) / (SHARED_SESSIONS - 1))
    return found


def forecast_session(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, prompt_tokens: int
) -> SessionForecast:
    """One session of the `client` over `servers` of `model`, on the route that it would take. Raises NoRoute.

    It begins with a prompt of `prompt_tokens`.
    """
    costs = Standing(StandingPolicy()).costs(_candidates(model, servers, client), 0.0)
    held = [each.hop for each in servers]
    route = find_route(model.blocks, held, costs, believed_ways(servers, client.round_trips_s))
    return forecast_route(model, servers, client, prompt_tokens, route)


def forecast_route(
    model: ModelInfo, servers: Sequence[Announcement], client: ClientPlace, prompt_tokens: int, route: Route
) -> SessionForecast:
    """The same on a given `route` over some of the `servers`."""
    ways = believed_ways(servers, client.round_trips_s)
    said = {each.peer: each for each in unmeasured_as_slow(_candidates(model, servers, client))}
    announced = {each.peer: each.offer for each in servers}
    half_s = {hop.peer: (said[hop.peer].round_trip_s or 0.0) / 2 for hop in route}
    hops: list[HopForecast] = []
    upload_s = model.row_bytes / client.upload_bytes_per_s if client.upload_bytes_per_s else 0.0
    for former, hop in zip((None, *route), route, strict=False):
        by_client_s = half_s[hop.peer] + (half_s[former.peer] if former is not None else 0.0)
        way_s = by_client_s if former is None else ways.get((former.peer, hop.peer), by_client_s)
        unpacked_s = upload_s if former is None else said[former.peer].said_upload_s
        send_s, prompt_send_s = (_send_s(model, each, unpacked_s) for each in (1, prompt_tokens))
        compute_s = len(hop.span) * said[hop.peer].said_block_s
        prompt_s = len(hop.span) * _prompt_block_s(announced[hop.peer], said[hop.peer].said_block_s, prompt_tokens)
        hops.append(HopForecast(hop, way_s, send_s, compute_s, prompt_send_s, prompt_s))
    last = route[-1].peer
    # At all hops at once. Before that those are asked for their load that others could replace.
    asked = replaceable(route, [each.hop for each in servers])
    open_s = 2 * max(half_s.values()) + 2 * max((half_s[hop.peer] for hop in asked), default=0.0)
    back_s, prompt_back_s = (_send_s(model, each, said[last].said_upload_s) for each in (1, prompt_tokens))
    return SessionForecast(tuple(hops), half_s[last] + back_s, prompt_back_s, client.token_s, open_s, prompt_tokens)


def _send_s(model: ModelInfo, positions: int, unpacked_s: float) -> float:
    """Sending this number of positions, of which one takes `unpacked_s` as it is, and less on a link that packs it."""
    if not unpacked_s:
        return 0.0
    return positions * unpacked_s * usual_share(model.precision.dtype, positions, model.row_bytes / unpacked_s)


def _prompt_block_s(offer: Offer, block_s: float, prompt_tokens: int) -> float:
    """The time of a prompt through one block: the fixed cost of a forward, which is that of one token, and the rest."""
    if not offer.speed.prefill_s:
        return prompt_tokens * block_s
    return block_s + prompt_tokens * max(0.0, offer.speed.prefill_s - block_s / PROMPT_POSITIONS)
