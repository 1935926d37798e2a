"""The values of `llmnode plan`, and their JSON: the blocks that this machine would serve in a swarm, and the gain.

Nothing is served. The blocks are chosen and loaded as `llmnode serve` would, and measured as it would; the network is
measured against the servers of the swarm. The rest is computed (`core/forecast.py`).
"""

from __future__ import annotations

import statistics
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import trio

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.forecast import ClientPlace, forecast
from llmnode.core.ids import PeerId
from llmnode.core.placement.claims import counted
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import block_speeds
from llmnode.core.policy import LinkPolicy, ProbePolicy
from llmnode.core.route import uncovered
from llmnode.core.speed import ComputeSpeed, NetworkSpeed, announced_speed
from llmnode.core.view import online
from llmnode.errors import ConfigError, PeerError, PeerUnreachable
from llmnode.machine.resident import resident_bytes
from llmnode.net.addresses import parse_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.forecast import SessionForecast, SwarmForecast
    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.net.invite import Invite
    from llmnode.node.app import NodeConfig
    from llmnode.swarm.membership import Swarm

ASKED = 64
"""Round trips are measured to at most this number of servers. A client takes others for distant, and so does a plan."""
NEAR_S = 0.0005
"""The round trip to a server on this machine."""
TOKENS_TIMED = 7
AWAY_S = 0.05
"""A client waits for servers between two tokens. Meanwhile its cores may sleep, and its caches lose the weights."""
HALF = 0.5


@dataclass(frozen=True, slots=True)
class OwnNode:
    """This machine as a server."""

    span: Span
    compute: ComputeSpeed
    network: NetworkSpeed
    weights_bytes: int
    kv_tokens: int
    kv_bytes: int
    """The keys and values of all these positions."""
    base_bytes: int = 0
    """The memory of the program itself."""
    relay_s: float = 0.0
    """The round trip to the nearest relay through which others reach it; 0 if they reach it directly."""

    @property
    def near_s(self) -> float:
        """The round trip of a client on this machine, which goes through the relay as those of others do."""
        return 2 * self.relay_s or NEAR_S


@dataclass(frozen=True, slots=True)
class Plan:
    """The swarm without this node and with it, and three things that would help further."""

    model: ModelInfo
    servers: Sequence[Announcement]
    node: OwnNode
    client: ClientPlace
    prompt_tokens: int

    @property
    def missing(self) -> list[Span]:
        """Blocks that nobody serves now."""
        return uncovered(self.model.blocks, [each.offer.span for each in self.servers])

    @property
    def own(self) -> Announcement:
        """The announcement that this node would make."""
        return self._announcement(self.node.span, self.node.network)

    @property
    def without(self) -> SwarmForecast:
        return self._forecast(self.servers, self.client)

    @property
    def with_it(self) -> SwarmForecast:
        return self._forecast([*self.servers, self.own], self.client)

    @property
    def with_nearer_client(self) -> SwarmForecast:
        """And with a client at half the distance from all servers."""
        return self._forecast([*self.servers, self.own], self.client.nearer(HALF))

    @property
    def with_faster_uplink(self) -> SwarmForecast:
        """And with twice the upload of this machine."""
        network = replace(self.node.network, upload_bytes_per_s=self.node.network.upload_bytes_per_s / HALF)
        client = replace(self.client, upload_bytes_per_s=self.client.upload_bytes_per_s / HALF)
        return self._forecast([*self.servers, self._announcement(self.node.span, network)], client)

    @property
    def with_another(self) -> SwarmForecast:
        """And with one more such node, which takes the blocks that the swarm needs then."""
        servers = [*self.servers, self.own]
        offers = [(each.peer, each.offer, 0.0) for each in servers]
        speeds = block_speeds(self.model.blocks, counted(offers, RebalancePolicy()))
        span = choose_span(len(self.node.span), speeds)
        another = replace(self._announcement(span, self.node.network), peer=PeerId("another such node"))
        return self._forecast([*servers, another], self.client)

    def _announcement(self, span: Span, network: NetworkSpeed) -> Announcement:
        compute, blocks = self.node.compute, len(span)
        speed = announced_speed(compute, network, blocks, self.model.row_bytes, ProbePolicy().next_peers)
        kv_tokens = self.node.kv_tokens
        state, block_us = PeerState.ONLINE, compute.block_us(blocks)
        offer = Offer(
            self.model.name, self.model.profile, self.model.blocks, span, state, block_us, kv_tokens, kv_tokens, speed
        )
        return Announcement(PeerId("this node"), (), 0, 0, "", offer)

    def _forecast(self, servers: Sequence[Announcement], client: ClientPlace) -> SwarmForecast:
        """A client on this machine: it is near to a server here, unless that is reached through a relay."""
        here = dict.fromkeys((PeerId("this node"), PeerId("another such node")), self.node.near_s)
        client = replace(client, round_trips_s={**client.round_trips_s, **here})
        return forecast(self.model, servers, client, self.prompt_tokens)


async def make_plan(
    config: NodeConfig, way_in: Invite, prompt_tokens: int, report: Callable[[str], None] = lambda _line: None
) -> Plan:
    """Measure, and say what would be. `report` is told in a line what takes long.

    Raises ConfigError (no such model, blocks that do not fit), ModelError, or PeerError if no peer answers.
    """
    from llmnode.node.app import measure_for, source_for
    from llmnode.node.serve.network_speed import measure_network, next_hops
    from llmnode.node.serve.placing import choose_blocks
    from llmnode.swarm.join import join_swarm

    joining = join_swarm(way_in.peers, LinkPolicy(), swarm_key=way_in.key, is_near=way_in.is_near)
    async with (
        joining as (_pool, swarm),
        source_for(swarm, config, report, lambda line, _serves: report(line)) as found,
    ):
        source, model = found
        span = await choose_blocks(config.blocks, model, source, swarm)
        servers = _servers(model, swarm)
        report(f"reading blocks {span} of {model.name}")
        base_bytes = await trio.to_thread.run_sync(resident_bytes)
        worker = await source.load(span)
        compute = await measure_for(config)(worker, model)
        kv_tokens, weights_bytes = worker.kv_tokens, source.tensor_bytes
        await source.drop()
        report("measuring the network")
        relay_s = await _nearest_relay_s(swarm, config.relays)
        network = await measure_network(swarm, next_hops(model, span, swarm), config.relays)
        round_trips_s = await _round_trips(swarm, {each.peer: each.addresses for each in servers[:ASKED]})
        token_s, kv_token_bytes = await trio.to_thread.run_sync(_time_ends, config, model, abandon_on_cancel=True)
    kv_bytes = kv_tokens * kv_token_bytes * len(span)
    node = OwnNode(span, compute, network, weights_bytes, kv_tokens, kv_bytes, base_bytes, relay_s)
    return Plan(model, servers, node, ClientPlace(round_trips_s, token_s, network.upload_bytes_per_s), prompt_tokens)


def _servers(model: ModelInfo, swarm: Swarm) -> list[Announcement]:
    """Those that serve the model now, in the precision of this node."""
    return [each for each in online(swarm.view.of_model(model.digest)) if each.offer.profile == model.profile]


async def _nearest_relay_s(swarm: Swarm, relays: Sequence[str]) -> float:
    """The round trip to the nearest of the `relays`; 0 without any. Raises PeerUnreachable if none answers."""
    found = await _round_trips(swarm, {PeerId(str(parse_peer(each).peer_id)): [each] for each in relays})
    if relays and not found:
        raise PeerUnreachable(f"no relay answers of {', '.join(relays)}: name one that `llmnode relay` started")
    return min(found.values(), default=0.0)


async def _round_trips(swarm: Swarm, peers: Mapping[PeerId, Sequence[str]]) -> dict[PeerId, float]:
    """Between this machine and those of the `peers` at these addresses that answer in time."""
    from llmnode.swarm.probing import measure_round_trip

    policy, found = ProbePolicy(), dict[PeerId, float]()

    async def measure(peer: PeerId, addresses: Sequence[str]) -> None:
        with suppress(PeerError, ConfigError), trio.move_on_after(policy.connect_s + policy.answer_s):
            connection = (await swarm.connect(addresses)).best
            found[peer] = await measure_round_trip(connection, policy)

    async with trio.open_nursery() as nursery:
        for peer, addresses in peers.items():
            nursery.start_soon(measure, peer, addresses)
    return found


def _time_ends(config: NodeConfig, model: ModelInfo) -> tuple[float, int]:
    """The time that a client here takes for its part of a token; and the bytes of KV for a position and block."""
    import time

    import torch

    from llmnode.client.sampling import likeliest
    from llmnode.models.load import load_ends
    from llmnode.models.open_model import open_model
    from llmnode.models.size import measure_size

    folder, precision = open_model(config.model), model.precision
    ends, times = load_ends(folder), list[float]()
    for _ in range(TOKENS_TIMED):
        time.sleep(AWAY_S)
        began_s = time.perf_counter()
        hidden = ends.embed([0], 0)
        likeliest(ends.logits(hidden))
        times.append(time.perf_counter() - began_s)
    size = measure_size(folder, getattr(torch, precision.dtype), precision.quant, precision.kv_dtype, "cpu")
    return statistics.median(times), size.kv_token_bytes


def as_json(plan: Plan) -> dict[str, Any]:  # Any: JSON
    """All values of a plan."""
    node, speed = plan.node, plan.own.offer.speed
    return {
        "model": plan.model.name,
        "dtype": plan.model.precision.name,
        "blocks": plan.model.blocks,
        "missing": [[each.start, each.end] for each in plan.missing],
        "servers": len(plan.servers),
        "node": {
            "blocks": [node.span.start, node.span.end],
            "decode_tokens_per_s": node.compute.decode_tokens_per_s,
            "shared_tokens_per_s": node.compute.shared_tokens_per_s,
            "prefill_tokens_per_s": node.compute.prefill_tokens_per_s,
            "upload_bytes_per_s": node.network.upload_bytes_per_s or None,
            "announced_tokens_per_s": speed.tokens_per_s or None,
            "weights_bytes": node.weights_bytes,
            "kv_tokens": node.kv_tokens,
            "kv_bytes": node.kv_bytes,
            "base_bytes": node.base_bytes,
            "relay_round_trip_us": round(1e6 * node.relay_s) or None,
        },
        "round_trips_us": {peer: round(1e6 * each) for peer, each in plan.client.round_trips_s.items()},
        "without": swarm_json(plan.without),
        "with": swarm_json(plan.with_it),
        "with_nearer_client": swarm_json(plan.with_nearer_client),
        "with_faster_uplink": swarm_json(plan.with_faster_uplink),
        "with_another": swarm_json(plan.with_another),
    }


def swarm_json(swarm: SwarmForecast) -> dict[str, Any]:  # Any: JSON
    """A forecast; its session is null while blocks are missing."""
    session = swarm.session and _session_json(swarm.session)
    return {"tokens_per_s": swarm.tokens_per_s, "sessions": swarm.sessions, "session": session}


def _session_json(session: SessionForecast) -> dict[str, Any]:  # Any: JSON
    return {
        "tokens_per_s": session.tokens_per_s,
        "first_token_s": session.first_token_s,
        "prompt_tokens": session.prompt_tokens,
        "compute_s": session.compute_s,
        "ways_s": session.ways_s,
        "send_s": session.send_s,
        "client_s": session.client_s,
        "hops": [[each.hop.peer, each.hop.span.start, each.hop.span.end] for each in session.hops],
    }
