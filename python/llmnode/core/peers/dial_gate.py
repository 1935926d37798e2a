"""The gate under every dial: which addresses a node dials because a stranger names them, and how often.

A stranger may name an address in the node's own network, to find out what is there, or that of a victim, under any
number of identities. So what counts is the address: where it is, and how the dials to it went. But a peer that proves
its identity in answer to a dial for another one has not failed: it may be dialled there, and others are not. The user's
word is enough for any address, though not for any number of dials. Opens no connection; the time is told.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.rates import KEYS, Rates

if TYPE_CHECKING:
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


@dataclass(slots=True)
class _Failure:
    until_s: float
    length_s: float


class DialGate:
    """For one node."""

    def __init__(self, policy: DialPolicy) -> None:
        self._policy = policy
        self._scopes = {PUBLIC}
        self._vouched: set[tuple[str, int]] = set()
        self._near: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._all = Rates(policy.burst, policy.per_s)
        self._places = Rates(policy.place_burst, policy.place_per_s)
        self._contacts = Rates(policy.contact_burst, policy.contact_per_s)
        self._hosts = Rates(policy.host_failures, policy.host_failures_per_s)
        self._failures: OrderedDict[tuple[str, int], _Failure] = OrderedDict()
        self._others: OrderedDict[tuple[str, int], tuple[PeerId, float]] = OrderedDict()
        """The peers that have answered dials to others at their addresses, and until when these are not dialled."""

    def vouch(self, host: str, port: int) -> None:
        """The user has named this address, which may be a name of DNS. Others in its network may be dialled, too."""
        self._vouched.add((host, port))
        if (scope := scope_of(host)) is not None:
            self._scopes.add(scope)

    def is_vouched(self, host: str, port: int) -> bool:
        return (host, port) in self._vouched

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
        if place not in self._vouched:
            if (scope := scope_of(host)) is None:
                return "strangers name addresses of IP, and none of other kinds"
            if (scope not in self._scopes and not is_seen and place not in self._near) or port <= 0:
                return "it is in a private network that this node is not in"
            other, until_s = self._others.get(place, (peer, now_s))
            if peer not in (None, other) and now_s < until_s:
                return "another peer was there lately"
            failure = self._failures.get(place)
            if failure is not None and now_s < failure.until_s and not is_repeated:
                return "it could not be reached lately"
            if self._hosts.wait_s(host, now_s) > 0:
                return "too much there could not be reached lately"
            if self._all.wait_s("", now_s) > 0:
                return "too many addresses are being dialled"
        places = self._contacts if place in self._vouched else self._places
        if places.wait_s(place, now_s) > 0:
            return "it was dialled too often"
        if place not in self._vouched:
            self._all.count("", now_s)
        places.count(place, now_s)
        return None

    def report(self, host: str, port: int, now_s: float, *, reached: bool, found: PeerId | None = None) -> None:
        """How a dial ended: whether the expected peer was reached there. Else another one may have been `found`.

        Then that one alone is dialled there for a while.
        """
        place = (host, port)
        failure = self._failures.pop(place, None)
        if found is not None:
            self._others[place] = found, now_s + self._policy.longest_pause_s
            self._others.move_to_end(place)
            if len(self._others) > KEYS:
                self._others.popitem(last=False)
            self._places.give_back(place, now_s)
            return
        if reached:
            self._places.give_back(place, now_s)
            self._contacts.give_back(place, now_s)
            self._all.give_back("", now_s)
            return
        if place not in self._vouched:
            self._hosts.count(host, now_s)
        if failure is None or failure.until_s + self._policy.longest_pause_s < now_s:
            failure = _Failure(now_s, self._policy.pause_s / 2)
        if failure.until_s <= now_s:
            failure.length_s = min(2 * failure.length_s, self._policy.longest_pause_s)
            failure.until_s = now_s + failure.length_s
        self._failures[place] = failure
        if len(self._failures) > KEYS:
            self._failures.popitem(last=False)


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
