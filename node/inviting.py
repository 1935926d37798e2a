"""Finds the peers that `llmnode invite` names if its user names none, and the models that they serve."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import PeerState
from llmnode.core.ids import PeerId
from llmnode.core.peers.invited import Candidate, DialledFrom, candidate, choose_invited, reach_of, widest
from llmnode.core.peers.whereabouts import in_turns, peer_of, votes
from llmnode.core.policy import JoinPolicy, LinkPolicy
from llmnode.errors import ConfigError, PeerError, single_error
from llmnode.machine.cache_disk import in_time_or
from llmnode.models.names import name_elsewhere
from llmnode.node.asking import look_at
from llmnode.node.stopping import run_async
from llmnode.node.text import counted
from llmnode.swarm.former_peers import FormerPeers
from llmnode.swarm.found_nearby import describe, find_nearby
from llmnode.swarm.own_nodes import NotedNode, running_nodes
from llmnode.swarm.remembering import NOT_RECALLED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

LOOK_S = 6.0
"""Servers that answer later are not named: the invite is to be of use at once."""
FIND_S = 30.0
"""The limit for all ways to find peers together. A peer that says nothing takes 10 s, and there may be dozens of files
and groups of former peers. Two silent ones leave time for another that answers, and the user still waits for it.
"""
TOLD_AFTER_S = 3.0
"""A way that takes longer than this is named in a line. Peers that run usually answer before."""
MOST_FORMER_SWARMS = 4
"""The latest ones that are tried."""
HERE, NEARBY, FORMER = "on this machine", "by mDNS", "by peers of a former run"
_ASKED = {HERE: "of a node on this machine", NEARBY: "that mDNS has found", FORMER: "of a former run"}
GIVE = "give --peers ADDRESS, as `llmnode serve` or `llmnode relay` prints it"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of servers that have answered, from this number of address groups. `elsewhere` is its name for other
    machines; None if they have no files. It `is_ours` if the own node serves it, or else a peer that its user named.
    """

    name: str
    elsewhere: str | None
    groups: int = 1
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The addresses for an invite, the models that are served there, and from where the peers can be dialled."""

    peers: tuple[str, ...]
    models: tuple[ServedModel, ...]
    reach: DialledFrom


@dataclass(frozen=True, slots=True)
class _Way:
    """Peers to try, of one swarm, with their addresses. Those that are only `is_near` are strangers."""

    where: str
    peers: Sequence[Sequence[str]]
    is_near: bool
    own: PeerId | None = None
    """The node of this machine that has named them. It is one of them if it has an address."""
    listening: Sequence[str] = ()
    """Where this node listens, too: it is dialled there, and the invite does not name it."""


def find_invited(key: bytes | None, report: Callable[[str], None], *, mdns: bool) -> Found | None:
    """Peers that answer now: those of a node on this machine, else those that mDNS finds, else those of former runs.

    None if there are none. `key` is that of a private swarm, which mDNS does not look for. `report` is told in lines
    what takes long, and what was found. If only this machine can dial the peers that answer, others of the same `key`
    are asked too; without a key no other swarm is looked for. After `FIND_S` seconds nobody else is asked, and the
    peers that were found by then count.
    """
    with single_error():
        return run_async(partial(_find, mdns=mdns), key, report)


async def _find(key: bytes | None, report: Callable[[str], None], *, mdns: bool) -> Found | None:
    here_alone: Found | None = None
    report = _each_once(report)  # several nodes of this machine may be in one swarm
    nearby = [partial(_nearby, report)] if mdns and key is None else []
    with trio.move_on_after(FIND_S) as scope:
        for ways in (partial(_own, key), *nearby, partial(_former, key)):
            for way in await ways():
                found = await _try_aloud(way, key, report)
                if found is None or not found.peers:
                    continue
                if found.reach is not DialledFrom.MACHINE:
                    return found
                here_alone = here_alone or found
            if here_alone is not None and key is None:
                return here_alone  # the user runs this swarm: the next ways lead to swarms of others
    if scope.cancelled_caught:
        report(f"{FIND_S:g} s have passed, and nobody else is asked")
    return here_alone


def _each_once(report: Callable[[str], None]) -> Callable[[str], None]:
    told: set[str] = set()

    def report_new(line: str) -> None:
        if line not in told:
            told.add(line)
            report(line)

    return report_new


async def _own(key: bytes | None) -> list[_Way]:
    none = list[NotedNode]()
    nodes = await in_time_or(partial(running_nodes, key), none, "no node of this machine is known")
    nodes.sort(key=lambda each: widest(each.addresses))  # those that are alike keep their order
    ways = [_Way(HERE, _by_peer(each.addresses), False, each.peer, _usable(each.listening)) for each in nodes]
    return [each for each in ways if each.peers]


async def _nearby(report: Callable[[str], None]) -> list[_Way]:
    with suppress(ConfigError, PeerError):
        found = await find_nearby(report, GIVE)
        return [_Way(NEARBY, _by_peer(found.peers), is_near=True)]
    return []


async def _former(key: bytes | None) -> list[_Way]:
    read, none = partial(FormerPeers((), key).swarms, time.time()), list[list[list[str]]]()
    swarms = await in_time_or(read, none, NOT_RECALLED)
    at_once = JoinPolicy().former_at_once
    parts: list[list[list[str]]] = []
    for swarm in swarms[:MOST_FORMER_SWARMS]:
        peers = _by_peer(address for peer in swarm for address in peer)
        parts += [peers[first : first + at_once] for first in range(0, len(peers), at_once)]
    return [_Way(FORMER, peers, is_near=True) for peers in parts]


async def _try_aloud(way: _Way, key: bytes | None, report: Callable[[str], None]) -> Found | None:
    """Does what `_try` does, and says in a line which peers are asked if it takes long."""

    async def tell() -> None:
        await trio.sleep(TOLD_AFTER_S)
        report(f"still asking {counted(len(way.peers), 'peer')} {_ASKED[way.where]}")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        found = await _try(way, key, report)
        nursery.cancel_scope.cancel()
    return found


async def _try(way: _Way, key: bytes | None, report: Callable[[str], None]) -> Found | None:
    """None if nobody answers there."""
    from llmnode.swarm.join import join_swarm

    addresses = [*way.listening, *(address for peer in way.peers for address in peer)]
    with suppress(PeerError, ConfigError):
        async with join_swarm(addresses, LinkPolicy(), swarm_key=key, is_near=way.is_near) as (pool, swarm):
            return await _look(way, pool, swarm, report)
    return None


async def _look(way: _Way, pool: ConnectionPool, swarm: Swarm, report: Callable[[str], None]) -> Found:
    answers = {peer for model in (await look_at(pool, swarm, LOOK_S)).models for peer in model.answers}
    stay = (PeerState.JOINING, PeerState.ONLINE)
    announced = {
        each.peer: replace(each, addresses=tuple(_usable(each.addresses)))
        for each in swarm.view.announcements()
        if each.offer.state in stay
    }
    reached = [each for each in announced.values() if each.peer in answers]
    connected = swarm.connected_in()
    named: dict[str, Candidate] = {}
    for addresses in way.peers:
        peer = peer_of(addresses[0])
        if peer in connected:  # mDNS has the address in this network, and the peer may announce others before it
            announces = announced[peer].addresses if peer in announced else ()
            stranger = candidate((*addresses, *announces), connected[peer])
            named[peer] = stranger if way.is_near else Candidate(addresses, announces, is_ours=True)
    for each in in_turns(reached, swarm.met_in()):
        named.setdefault(each.peer, candidate(each.addresses, connected.get(each.peer)))
    if way.where != NEARBY:  # which has said it
        report(f"found {way.where}: {describe(reached) if reached else _relays(len(named))}")
    ours = _ours(way, connected.keys() & announced.keys())
    servers = [each for each in announced.values() if each.peer in answers or each.peer in ours]
    return Found(choose_invited(named.values()), _models(servers, swarm.met_in(), ours), reach_of(named.values()))


def _relays(number: int) -> str:
    return f"{counted(number, 'peer')}, and no server that answers"


def _ours(way: _Way, serving: Collection[PeerId]) -> list[PeerId]:
    """The peers whose word on the model counts before that of others: the own node if it serves, else those that its
    user named.
    """
    if way.is_near:
        return []
    named = [peer_of(each[0]) for each in way.peers]
    if way.own is not None and way.own in serving:
        return [way.own]
    return [each for each in named if each in serving]


def _models(
    servers: Sequence[Announcement], met: Mapping[PeerId, str], ours: Collection[PeerId]
) -> tuple[ServedModel, ...]:
    """Those of our peers first, and then those in most address groups. Each has the name that most groups give it."""
    by_digest: dict[bytes, list[Announcement]] = {}
    for each in servers:
        by_digest.setdefault(each.offer.profile.model_digest, []).append(each)
    found: list[ServedModel] = []
    for digest, of in by_digest.items():
        own = [each for each in of if each.peer in ours]
        named_by: dict[str, set[PeerId]] = {}
        for each in own or of:
            named_by.setdefault(each.offer.model, set()).add(each.peer)
        name = max(sorted(named_by), key=lambda name: len(votes(named_by[name], met)))
        groups = len(votes((each.peer for each in of), met))
        found.append(ServedModel(name, _elsewhere(name, digest), groups, bool(own)))
    return tuple(sorted(found, key=lambda each: (not each.is_ours, -each.groups, each.name)))


def _elsewhere(name: str, digest: bytes) -> str | None:
    """A stranger may have given the name: it counts only if an invite can have it."""
    from llmnode.core.hub_names import split_hub_name
    from llmnode.net.invite import MODEL_CHARS

    elsewhere = name_elsewhere(name, digest)
    fits = elsewhere is not None and len(elsewhere) <= MODEL_CHARS and split_hub_name(elsewhere) is not None
    return elsewhere if fits else None


def _usable(addresses: Iterable[str]) -> list[str]:
    """Those that have the form of a peer's address. A stranger announces any text, and commands refuse an invite with
    one address that they cannot read.
    """
    from llmnode.net.addresses import parse_peer

    found: list[str] = []
    for each in addresses:
        with suppress(ConfigError):
            parse_peer(each)
            found.append(each)
    return found


def _by_peer(addresses: Iterable[str]) -> list[list[str]]:
    """The usable addresses of each peer."""
    by_peer: dict[str, list[str]] = {}
    for each in _usable(addresses):
        by_peer.setdefault(peer_of(each), []).append(each)
    return list(by_peer.values())
