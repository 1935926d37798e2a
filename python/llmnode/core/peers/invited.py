"""Chooses the peers that an invite names: few, and those that most others can dial. Opens no connection.

Strangers announce any addresses. So an address counts as far as it is known: we are connected there, or the user of its
node has said so. A claim comes after all of these, and keeps no peer out of an invite.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from llmnode.core.alternating import alternating
from llmnode.core.peers.dial_gate import PUBLIC, scope_of
from llmnode.core.peers.whereabouts import CIRCUIT, claimed_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_PEERS = 4
"""One that answers is enough, and some may be gone by the time that somebody uses the invite."""
MOST_ADDRESSES = 5
"""Those of all these peers. A QR code of them, a key and a model fits into a terminal of 80 columns."""
_PRIVATE_NAMES = (".local", ".lan", ".home", ".internal", ".home.arpa")
"""The DNS of the internet has no names that end so (RFC 6762 and 8375, and a resolution of ICANN)."""


class DialledFrom(IntEnum):
    """The machines that can dial an address, the most first."""

    INTERNET = 0
    NETWORK = 1
    """A private network, or one link."""
    MACHINE = 2
    """None but the peer's own."""
    NOWHERE = 3
    """None: no invite names it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that an invite may name, with the addresses where it is known to be, and others that it claims."""

    known: Sequence[str]
    claims: Sequence[str] = ()
    is_ours: bool = False
    """It is a node of our user, or our user has named it."""


def candidate(addresses: Iterable[str], met_in: str | None) -> Candidate:
    """A stranger that announces `addresses`. Those in the address group where we are connected to it are known."""
    found = list(dict.fromkeys(addresses))
    known = [each for each in found if claimed_group(each) == met_in]
    return Candidate(known, [each for each in found if each not in known])


def dialled_from(address: str) -> DialledFrom:
    """A circuit counts as its relay does, and a name of DNS as one of the internet, unless it is a private one."""
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return _named_from(host.lower().rstrip("."))
    scope = scope_of(host) if kind in ("ip4", "ip6") else None
    if scope == PUBLIC:
        return DialledFrom.INTERNET
    if scope == "machine":
        return DialledFrom.MACHINE
    # An IPv6 address of a link needs the name of an interface, which differs between machines.
    is_nowhere = scope is None or (scope == "link" and kind == "ip6")
    return DialledFrom.NOWHERE if is_nowhere else DialledFrom.NETWORK


def _named_from(host: str) -> DialledFrom:
    if not host:
        return DialledFrom.NOWHERE
    if host == "localhost" or host.endswith(".localhost"):
        return DialledFrom.MACHINE
    is_private = "." not in host or host.endswith(_PRIVATE_NAMES)
    return DialledFrom.NETWORK if is_private else DialledFrom.INTERNET


def widest(addresses: Iterable[str]) -> DialledFrom:
    """From where the best of these is dialled."""
    return min(map(dialled_from, addresses), default=DialledFrom.NOWHERE)


def reach_of(peers: Iterable[Candidate]) -> DialledFrom:
    """From where the best of these peers is dialled, as far as it is known."""
    several = list(peers)
    known = widest(address for each in several for address in each.known)
    return known if known is not DialledFrom.NOWHERE else widest(one for each in several for one in each.claims)


def choose_invited(peers: Iterable[Candidate]) -> tuple[str, ...]:
    """The addresses for an invite, of `peers` that answer now; the most trusted first.

    They are of at most MOST_PEERS peers, of different address groups first. The best peer of our user is the first.
    Others follow by how far they are known to be dialled from, and those that need no relay go before the others. A
    second address of a peer comes after the first one of each: an address of a container's network may be among them.
    Addresses that only the peer's own machine can dial are left out, unless nothing else is known. So are those in
    private networks if the internet dials the peer itself: they tell strangers what is in these networks.
    """
    several = list(peers)
    most = DialledFrom.MACHINE if reach_of(several) is DialledFrom.MACHINE else DialledFrom.NETWORK
    usable = [found for each in several if (found := _within(each, most)).known or found.claims]
    usable.sort(key=_rank)
    groups: set[str] = set()
    first: list[Candidate] = []
    rest: list[Candidate] = []
    for each in usable:
        group = claimed_group(_in_order(each)[0])
        (first if each.known and group not in groups else rest).append(each)
        groups.add(group)
    ours = [each for each in usable if each.is_ours][:1]
    chosen = [*ours, *(each for each in (*first, *rest) if each not in ours)][:MOST_PEERS]
    return tuple(alternating(map(_in_order, chosen)))[:MOST_ADDRESSES]


def _within(peer: Candidate, most: DialledFrom) -> Candidate:
    """The peer with those of its addresses that are dialled from as far as `most`, the best first."""
    known = sorted((each for each in dict.fromkeys(peer.known) if dialled_from(each) <= most), key=_cost)
    others = (each for each in dict.fromkeys(peer.claims) if each not in known)
    claims = sorted((each for each in others if dialled_from(each) <= DialledFrom.NETWORK), key=_cost)
    public = [each for each in known if dialled_from(each) is DialledFrom.INTERNET and CIRCUIT not in each]
    return Candidate(_without_private(known, public), _without_private(claims, public), peer.is_ours)


def _without_private(addresses: Sequence[str], public: Sequence[str]) -> list[str]:
    """Without those in private networks which the `public` addresses of the same peer make needless.

    A peer that is private over IPv4 and public over IPv6 is behind a NAT: its network needs the address of IPv4.
    """
    over_4 = [each for each in public if not each.startswith("/ip6/")]
    return [
        each
        for each in addresses
        if dialled_from(each) is not DialledFrom.NETWORK or not (public if each.startswith("/ip6/") else over_4)
    ]


def _in_order(peer: Candidate) -> list[str]:
    return [*peer.known, *peer.claims]


def _rank(peer: Candidate) -> tuple[bool, DialledFrom, bool]:
    return (not peer.known, *_cost(_in_order(peer)[0]))


def _cost(address: str) -> tuple[DialledFrom, bool]:
    return dialled_from(address), CIRCUIT in address
