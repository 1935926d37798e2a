"""Measures the network of a serving node, against other peers of its swarm: the round trips to those that may be the
next hop, and how fast a few peers take bytes from it. There is no other service that it asks.

Peers that are measured may be slow on purpose: see `swarm/probing.py` and `core/speed.py: usual_rate`. A node that is
reached through relays alone sends its probes to those, since everything that it sends to clients goes through them.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import trio

from llmnode.core.peers.whereabouts import CIRCUIT
from llmnode.core.policy import ProbePolicy
from llmnode.core.speed import NetworkSpeed, observed_upload, usual_rate
from llmnode.core.view import online
from llmnode.errors import ConfigError, PeerError
from llmnode.swarm.probing import measure_round_trip, measure_upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.node.serve.role import Role
    from llmnode.ports import Network
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.peer_connection import PeerConnection

log = logging.getLogger(__name__)


async def keep_measuring(
    role: Role,
    swarm: Swarm,
    network: Network,
    policy: ProbePolicy | None = None,
    rng: random.Random | None = None,
) -> NoReturn:
    """Measure now, when it is time, and when other peers may be the next hop, until cancelled. `role` announces it.

    Others cause round trips at most by announcing more peers, and no probes. After probes that nobody took, the pause
    before the next probes doubles. Until then the rates that peers of sessions tell correct them. After new peers of
    which none answers, that before the next new peers does. Peers that did not answer are asked again, after a pause
    that doubles likewise. A round trip that was measured before stays, until there is a newer one, or the peer may not
    be the next hop any more.
    """
    policy, rng, probed_bytes_per_s = policy or ProbePolicy(), rng or random.Random(), 0.0

    def upload_bytes_per_s() -> float:
        return observed_upload(probed_bytes_per_s, network.send_rates.by_group(trio.current_time()))

    probes_at_s, pause_s, soon_s, are_new = -math.inf, policy.soon_s, policy.soon_s, False
    while True:
        nexts, others = next_hops(role.model, role.span, swarm), others_than(swarm)
        probes = trio.current_time() >= probes_at_s and bool(others or nexts or swarm.contacts)
        found = await measure_network(swarm, nexts, relays_of(network.addresses), policy, rng, probes=probes)
        if probes:
            pause_s = policy.again_s if found.upload_bytes_per_s else min(2 * pause_s, policy.again_s)
            probes_at_s = trio.current_time() + pause_s
        former_s = {peer: each for peer, each in (role.network.round_trips_s or {}).items() if peer in nexts}
        round_trips_s = former_s | dict(found.round_trips_s or {})
        lacks_some = len(round_trips_s) < min(len(nexts), policy.next_peers)
        if len(round_trips_s) > len(former_s):
            soon_s = policy.soon_s
        elif are_new or lacks_some:
            soon_s = min(2 * soon_s, policy.again_s)
        probed_bytes_per_s = found.upload_bytes_per_s or probed_bytes_per_s
        if probed_bytes_per_s or round_trips_s:
            role.note_network(NetworkSpeed(upload_bytes_per_s(), round_trips_s))
        await trio.sleep(soon_s)
        if lacks_some:
            are_new = False
            continue
        with trio.move_on_at(max(probes_at_s, trio.current_time() + policy.soon_s)) as patience:
            while next_hops(role.model, role.span, swarm).keys() <= nexts.keys() and bool(others_than(swarm)) <= bool(
                others
            ):
                await swarm.wait_changed()
                await trio.sleep(policy.soon_s)  # each look is at the whole view
                told_bytes_per_s = role.network.upload_bytes_per_s
                if abs(upload_bytes_per_s() - told_bytes_per_s) > policy.tell_change * told_bytes_per_s:
                    role.note_network(replace(role.network, upload_bytes_per_s=upload_bytes_per_s()))
        are_new = not patience.cancelled_caught


def others_than(swarm: Swarm) -> list[Sequence[str]]:
    """The addresses of the peers that serve anything, but our own."""
    served = online(swarm.view.announcements())
    return [each.addresses for each in served if each.addresses and each.peer != swarm.peer]


def next_hops(model: ModelInfo, span: Span, swarm: Swarm) -> dict[PeerId, Sequence[str]]:
    """The addresses of the peers to which a server of `span` may push its results."""
    return {
        each.peer: each.addresses
        for each in online(swarm.view.of_model(model.digest))
        if each.peer != swarm.peer
        and each.addresses
        and each.offer.profile == model.profile
        and each.offer.span.start <= span.end < each.offer.span.end
    }


def relays_of(addresses: Iterable[str]) -> list[str]:
    """The relays through which alone a node at `addresses` is reached; none if it is reached directly."""
    addresses = list(addresses)
    if not all(CIRCUIT in each for each in addresses):
        return []
    return list(dict.fromkeys(each.partition(CIRCUIT)[0] for each in addresses))


async def measure_network(
    swarm: Swarm,
    nexts: dict[PeerId, Sequence[str]],
    relays: Sequence[str] = (),
    policy: ProbePolicy | None = None,
    rng: random.Random | None = None,
    *,
    probes: bool = True,
) -> NetworkSpeed:
    """The round trips to some of the peers at `nexts`, and with `probes` the upload: to the `relays` if there are any,
    else to those peers, or to others of the `swarm` if none of them takes a probe. A peer that fails, or takes too
    long, is left out. `policy` has the limits, and `rng` chooses the peers.
    """
    policy, rng = policy or ProbePolicy(), rng or random.Random()
    chosen = dict(rng.sample(sorted(nexts.items()), min(len(nexts), policy.next_peers)))
    connections = await _connected(swarm, list(chosen.values()), policy)
    round_trips_s: dict[PeerId, float] = {}
    async with trio.open_nursery() as nursery:
        for each in connections:
            nursery.start_soon(_note_round_trip, each, round_trips_s, policy)
    if not probes:
        return NetworkSpeed(0.0, round_trips_s)
    if relays:
        connections = await _connected(swarm, [[each] for each in relays], policy)
    upload_bytes_per_s = await _upload(connections, policy, rng)
    if not upload_bytes_per_s and not relays:
        others = await _connected(swarm, _others(swarm, policy, rng), policy)
        upload_bytes_per_s = await _upload([each for each in others if each.peer not in chosen], policy, rng)
    return NetworkSpeed(upload_bytes_per_s, round_trips_s)


def _others(swarm: Swarm, policy: ProbePolicy, rng: random.Random) -> list[Sequence[str]]:
    """Addresses of some peers that serve anything, and of some contacts of the user: strangers may announce peers that
    cannot be reached, or take no probes.
    """
    found = others_than(swarm), [[each] for each in swarm.contacts]
    return [peer for peers in found for peer in rng.sample(peers, min(len(peers), policy.upload_peers))]


async def _connected(swarm: Swarm, peers: Iterable[Sequence[str]], policy: ProbePolicy) -> list[PeerConnection]:
    """Connections to those of the peers that can be reached in time. All are dialled at once."""
    connections: list[PeerConnection] = []

    async def connect(addresses: Sequence[str]) -> None:
        try:
            with trio.move_on_after(policy.connect_s):
                connections.append((await swarm.connect(addresses)).best)
        except (PeerError, ConfigError) as error:
            log.debug("not measured: %s", error)

    async with trio.open_nursery() as nursery:
        for addresses in peers:
            nursery.start_soon(connect, addresses)
    return connections


async def _note_round_trip(connection: PeerConnection, round_trips_s: dict[PeerId, float], policy: ProbePolicy) -> None:
    try:
        round_trips_s[connection.peer] = await measure_round_trip(connection, policy)
    except PeerError as error:
        log.debug("no round trip: %s", error)


async def _upload(connections: Sequence[PeerConnection], policy: ProbePolicy, rng: random.Random) -> float:
    """One peer after the other, each of another address group if possible: together they would share the line."""
    by_group: dict[str, list[PeerConnection]] = {}
    peers = {each.peer: each for each in connections}  # a contact may serve something, too
    for each in rng.sample([*peers.values()], len(peers)):
        by_group.setdefault(each.source.group, []).append(each)
    first_of_groups = [each for _, each in sorted(_places(by_group), key=lambda place: place[0])]
    rates: dict[str, list[float]] = {}
    for connection in first_of_groups[: 2 * policy.upload_peers]:
        try:
            rates.setdefault(connection.source.group, []).append(await measure_upload(connection, policy))
        except PeerError as error:
            log.debug("no upload: %s", error)
        if sum(map(len, rates.values())) == policy.upload_peers:
            break
    return usual_rate(rates)


def _places(by_group: dict[str, list[PeerConnection]]) -> list[tuple[int, PeerConnection]]:
    """Each connection with its place in its group."""
    return [place for group in by_group.values() for place in enumerate(group)]
