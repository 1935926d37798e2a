"""The gate under every dial: which addresses a node dials because a stranger names them, and how often.

A stranger may name an address in the node's own network, to find out what is there, or that of a victim, under any
number of identities. So what counts is the address: where it is, and how the dials to it went. But a peer that has
proved its identity at an address waits for nothing that dials to others have cost. If it did so in answer to a dial for
another one, others are not dialled there for a while. The user's word is enough for any address of a peer, though not
for any number of dials. Opens no connection; the time is told.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.address_groups import address_groups
from llmnode.core.rates import KEYS, Rates

if TYPE_CHECKING:
    from collections.abc import Hashable

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import DialPolicy

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
PUBLIC = "public"
RANGES = [
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10")
]
RANGES_4 = [str(each) for each in RANGES if each.version == 4]
UNICAST = ipaddress.ip_network("2000::/3")
"""All addresses of the internet that IANA has assigned for IPv6."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that end with an IPv4 address, to which a gateway of the node's own network leads (RFC 6052)."""
NOWHERE = [ipaddress.ip_network(each) for each in ("192.0.0.0/24", "3fff::/20")]
"""Addresses of protocols (RFC 6890; some clouds have metadata there) and of documents (RFC 9637), public to Python."""
MOST_GROUPS = 256
"""Address groups in which a node remembers the peers that it has met."""
MET_OF_GROUP = 64
"""The addresses of each. A stranger at one group may have any number of ports."""


@dataclass(slots=True)
class _Failure:
    until_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class _Met:
    peer: PeerId
    alone_until_s: float
    """Until then no other peer is dialled there."""


class DialGate:
    """For one node."""

    def __init__(self, policy: DialPolicy) -> None:
        self._policy = policy
        self._scopes = {PUBLIC}
        self._vouched: dict[tuple[str, int], set[PeerId | None]] = {}
        self._near: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._all = Rates(policy.burst, policy.per_s)
        self._places = Rates(policy.place_burst, policy.place_per_s)
        self._contacts = Rates(policy.contact_burst, policy.contact_per_s)
        self._hosts = Rates(policy.host_failures, policy.host_failures_per_s)
        self._failures: OrderedDict[tuple[str, int], _Failure] = OrderedDict()
        self._met: OrderedDict[str, OrderedDict[tuple[str, int], _Met]] = OrderedDict()
        """The peer that has proved its identity at an address last, by address groups."""

    def vouch(self, host: str, port: int, peer: PeerId | None = None) -> None:
        """The user has named this address of a peer, which may be a name of DNS. Others in its network may be dialled,
        too.
        """
        self._vouched.setdefault((host, port), set()).add(peer)
        if (scope := scope_of(host)) is not None:
            self._scopes.add(scope)

    def is_vouched(self, host: str, port: int, peer: PeerId | None = None) -> bool:
        """Whether the user has named this address of `peer`, or of anybody if that is None."""
        named = self._vouched.get((host, port), ())
        return bool(named) if peer is None else peer in named or None in named

    def note_near(self, host: str, port: int) -> None:
        """A peer said, from this host and to our own network, that it is there. It may be dialled as any stranger."""
        self._near[host, port] = None
        self._near.move_to_end((host, port))
        if len(self._near) > KEYS:
            self._near.popitem(last=False)

    def live_at(self, hosts: list[str]) -> None:
        """The node announces these addresses. If all are private, peers in these private networks may be dialled.

        A node that is private over IPv4 and public over IPv6 is behind a NAT. It dials within its networks of IPv4.
        """
        public = [each for each in hosts if scope_of(each) == PUBLIC]
        for host in hosts:
            scope = scope_of(host)
            counts = [each for each in public if ":" not in each] if scope in RANGES_4 else public
            if scope is not None and not counts:
                self._scopes.add(scope)

    def why_not(
        self,
        host: str,
        port: int,
        now_s: float,
        peer: PeerId | None = None,
        *,
        is_seen: bool = False,
        is_repeated: bool = False,
    ) -> str | None:
        """Why a stranger's address is not dialled now. None if it is, and then it counts. `peer` is expected there.

        The stranger `is_seen` if it has connected to us from this host. Then it need not be in a network of ours. A
        dial `is_repeated` at once in hole punching, where both sides have to dial at the same time.
        """
        place = (host, port)
        is_vouched, met = self.is_vouched(host, port, peer), self._met_at(place)
        is_met = met is not None and met.peer == peer
        if not is_vouched:
            if (scope := scope_of(host)) is None:
                return "strangers name addresses of IP, and none of other kinds"
            if (scope not in self._scopes and not is_seen and place not in self._near) or port <= 0:
                return "it is in a private network that this node is not in"
            if met is not None and peer not in (None, met.peer) and now_s < met.alone_until_s:
                return "another peer was there lately"
            failure = self._failures.get(place)
            if failure is not None and now_s < failure.until_s and not is_repeated:
                return "it could not be reached lately"
            if not is_met and self._hosts.wait_s(host, now_s) > 0:
                return "too much there could not be reached lately"
            if self._all.wait_s(is_met, now_s) > 0:
                return "too many addresses are being dialled"
        places, key = self._contacts if is_vouched else self._places, self._key(place, peer)
        if places.wait_s(key, now_s) > 0:
            return "it was dialled too often"
        if not is_vouched:
            self._all.count(is_met, now_s)
        places.count(key, now_s)
        return None

    def report(
        self,
        host: str,
        port: int,
        now_s: float,
        *,
        reached: bool,
        peer: PeerId | None = None,
        found: PeerId | None = None,
    ) -> None:
        """How a dial ended: whether the expected `peer` was reached there. Else another one may have been `found`.

        Then that one alone is dialled there for a while.
        """
        place = (host, port)
        key, met = self._key(place, peer), self._met_at(place)
        failure = self._failures.pop(place, None)
        if found is not None:
            self._places.give_back(key, now_s)
            self._note_met(place, _Met(found, now_s + self._policy.longest_pause_s))
            return
        if reached:
            self._places.give_back(key, now_s)
            self._contacts.give_back(key, now_s)
            self._all.give_back(met is not None and met.peer == peer, now_s)
            if peer is not None:
                self._note_met(place, met if met is not None and met.peer == peer else _Met(peer, now_s))
            return
        if not self.is_vouched(host, port, peer):
            self._hosts.count(host, now_s)
        if failure is None or failure.until_s + self._policy.longest_pause_s < now_s:
            failure = _Failure(now_s, self._policy.pause_s / 2)
        if failure.until_s <= now_s:
            failure.length_s = min(2 * failure.length_s, self._policy.longest_pause_s)
            failure.until_s = now_s + failure.length_s
        self._failures[place] = failure
        if len(self._failures) > KEYS:
            self._failures.popitem(last=False)

    def _key(self, place: tuple[str, int], peer: PeerId | None) -> Hashable:
        """Dials for a peer that the user has named there, or that was met there, do not count with those for others."""
        met = self._met_at(place)
        is_own = peer in self._vouched.get(place, ()) or (met is not None and met.peer == peer)
        return (place, peer) if is_own and peer is not None else place

    def _met_at(self, place: tuple[str, int]) -> _Met | None:
        of_group = self._met.get(address_groups(place[0])[0])
        return None if of_group is None else of_group.get(place)

    def _note_met(self, place: tuple[str, int], met: _Met) -> None:
        group = address_groups(place[0])[0]
        of_group = self._met.setdefault(group, OrderedDict())
        self._met.move_to_end(group)
        of_group[place] = met
        of_group.move_to_end(place)
        if len(of_group) > MET_OF_GROUP:
            of_group.popitem(last=False)
        if len(self._met) > MOST_GROUPS:
            self._met.popitem(last=False)


def scope_of(host: str) -> str | None:
    """The network in which an IP address means something; None for names, and for addresses that nobody is at."""
    try:
        ip: IpAddress = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if ip.is_multicast or ip.is_unspecified or getattr(ip, "ipv4_mapped", None):
        return None
    if ip.is_loopback:
        return "machine"
    if ip.is_link_local:
        return "link"
    if _is_public(ip):
        return PUBLIC
    for each in RANGES:
        if ip in each:
            return str(each)
    return None if ip.is_reserved or getattr(ip, "sixtofour", None) else "other"


def _is_public(ip: IpAddress) -> bool:
    """Whether hosts of the internet may be there, and no gateway in the node's own network leads inside from it."""
    if not ip.is_global or any(ip in each for each in NOWHERE):
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return True
    inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in NAT64 else ip.sixtofour
    return (ip in UNICAST or ip in NAT64) and (inner is None or inner.is_global)


def is_local(host: str) -> bool:
    """Whether it is an address of a private network, as homes and offices have: RFC 1918, and RFC 4193 for IPv6."""
    return scope_of(host) in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
