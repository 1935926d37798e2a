"""Addresses of peers: where a host listens, what it tells others, and how to reach a peer, directly or through a relay.

A circuit address is that of a relay and then `/p2p-circuit/p2p/PEER`. Opens no connection.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import InvalidAddrError, PeerInfo, info_from_p2p_addr
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from llmnode.core.alternating import alternating
from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import PUBLIC, scope_of
from llmnode.core.peers.whereabouts import CIRCUIT
from llmnode.errors import ConfigError
from llmnode.wire.fields import ADDRESS_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LISTEN_ANY_LOOPBACK = "/ip4/127.0.0.1/tcp/0"

HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")

_HOST_AND_PORT = re.compile(r"(\w+://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})/?")


# Multiaddrs as bytes: https://github.com/multiformats/multiaddr/blob/master/protocols.csv
_IP_ENDS = {b"\x04": 5, b"\x29": 17}
"""The bytes of an IPv4 and of an IPv6 address, with the code before it."""
_TCP = 6
_P2P = b"\xa5\x03"


def parse_peer(address: str) -> PeerInfo:
    """Peer id and address in a multiaddr that ends in `/p2p/ID`. Raises ConfigError with the form that is right."""
    try:
        info = info_from_p2p_addr(Multiaddr(address))
        _check_dialled((relay_of(info) or info).addrs)
    except (MultiaddrError, InvalidAddrError, ValueError) as error:
        raise ConfigError(
            f"{address!r} is not the address of a peer ({_fault(address, error)}): write {_form(address)}, "
            "as `llmnode serve` prints it"
        ) from error
    return info


def parse_peer_id(text: str) -> PeerId:
    """The peer id that `text` is, as in `/p2p/ID`. Raises ConfigError."""
    try:
        (_, found), *rest = Multiaddr(f"/p2p/{text}").items()
    except (MultiaddrError, ValueError):
        found, rest = "", []
    if rest or str(found) != text:
        raise ConfigError(f"{text!r} is no peer id: give those that `llmnode status --json` shows, as 12D3KooW...")
    return PeerId(text)


def _check_dialled(addresses: Sequence[Multiaddr]) -> None:
    """Raises ValueError unless it is one that TCP can dial."""
    if not addresses or not (protocols := [protocol.name for protocol in addresses[0].protocols()]):
        raise ValueError("it does not say where the peer is")
    if protocols[0] not in HOSTS or protocols[1:] != ["tcp"]:
        raise ValueError("peers are dialled by TCP alone")
    if not int(addresses[0].value_for_protocol("tcp")):
        raise ValueError("port 0 means any port where a node listens, and none to dial")


def _fault(address: str, error: Exception) -> str:
    if "://" in address or not address.startswith("/"):
        return "it is no multiaddr"
    if "/p2p/" not in address:
        return "it ends without /p2p/PEER_ID"
    return str(error).removeprefix(f"Invalid MultiAddr {address!r}").removesuffix(f" (string: {address})").lstrip(": ")


def _form(address: str) -> str:
    """The multiaddr, if `address` is a host and port."""
    match = _HOST_AND_PORT.fullmatch(address)
    host = match["host"].strip("[]") if match else ""
    try:
        protocol = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        protocol = "dns"
    return f"/{protocol}/{host}/tcp/{match['port']}/p2p/PEER_ID" if match else "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"


def peer_at_ip(address: str) -> PeerInfo | None:
    """Like `parse_peer`, for any text that a stranger calls an address. None for any that is not of an IP address and
    TCP.
    """
    try:
        info = parse_peer(address)
    except ConfigError:
        return None
    return info if info.addrs and host_and_port(info.addrs[0]) else None


def relay_of(info: PeerInfo) -> PeerInfo | None:
    """The relay through which a peer is reached that `parse_peer` returned; None if it is reached directly.

    Raises ValueError, or an error of libp2p, for a circuit through none or several.
    """
    relay, circuit, rest = str(info.addrs[0]).partition(CIRCUIT) if info.addrs else ("", "", "")
    if not circuit:
        return None
    if rest or not relay:
        raise ValueError(f"a circuit goes through one relay: RELAY{CIRCUIT}/p2p/PEER_ID")
    return info_from_p2p_addr(Multiaddr(relay))


def parse_relay(address: str) -> PeerInfo:
    """The peer info of a relay that is to reserve for us. Raises ConfigError."""
    info = parse_peer(address)
    if relay_of(info) is not None:
        raise ConfigError(f"--relay {address!r} is itself reached through a relay: name one that is reached directly")
    if len(circuit_address(info, info.peer_id)) > ADDRESS_CHARS:
        raise ConfigError(f"--relay {address!r}: what others are told of it has at most {ADDRESS_CHARS} characters")
    return info


def circuit_address(relay: PeerInfo, peer: ID) -> str:
    """Where `peer` is reached through `relay`."""
    return f"{relay.addrs[0]}/p2p/{relay.peer_id}{CIRCUIT}/p2p/{peer}"


@dataclass(frozen=True, slots=True)
class _At:
    """One address of a host."""

    address: str
    host: str
    is_spare: bool
    """An interface of this machine alone, which counts only if there is no other."""


def all_reachable(addresses: Iterable[Multiaddr]) -> list[str]:
    """Where others reach a host that listens at `addresses`: of those at each interface, the address of the interface.

    Those of the internet come first, and then those of IPv4 and IPv6 in turn: an announcement has few, and py-libp2p
    dials the first alone.
    """
    found = [_reachable(each) for each in addresses]
    public = [[each for each in several if scope_of(each.host) == PUBLIC] for several in found]
    others = [[each for each in several if scope_of(each.host) != PUBLIC] for several in found]
    in_order = [*alternating(public), *alternating(others)]
    told = [each for each in in_order if not each.is_spare] or in_order
    return list(dict.fromkeys(each.address for each in told))


def _reachable(address: Multiaddr) -> list[_At]:
    """A host that listens everywhere names the addresses of its interfaces."""
    version = next(iter(address.protocols())).name
    ip = ipaddress.ip_address(address.value_for_protocol(version))
    if not ip.is_unspecified:
        return [_At(str(address), str(ip), is_spare=False)]
    usable = [each for each in own_ips() if each.version == ip.version and not each.is_link_local]
    return [_At(str(address).replace(f"/{ip}/", f"/{each}/", 1), str(each), each.is_loopback) for each in usable]


def own_ips() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IP addresses of this machine's interfaces."""
    return [
        ipaddress.ip_address(each.address.partition("%")[0])
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]


def versions_of(addresses: Iterable[Multiaddr | str]) -> set[str]:
    """Those of IP that `addresses` are of: each if none is at an IP address."""
    return {"ip4", "ip6"} & {str(each).split("/")[1] for each in addresses} or {"ip4", "ip6"}


def tcp_address(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where TCP dials."""

    protocol: str
    """One of HOSTS."""
    host: str
    port: int

    @property
    def is_ip(self) -> bool:
        return self.protocol in ("ip4", "ip6")


def place_of(address: Multiaddr) -> Place | None:
    """The only host and TCP port of `address`. None if it has other parts, except the peer there.

    py-libp2p dials the last IP address of several.
    """
    names = [protocol.name for protocol in address.protocols()]
    if names[:1] not in ([each] for each in HOSTS) or names[1:] not in (["tcp"], ["tcp", "p2p"]):
        return None
    return Place(names[0], str(address.value_for_protocol(names[0])), int(address.value_for_protocol("tcp")))


def host_and_port(address: Multiaddr) -> tuple[str, int] | None:
    """The IP address and TCP port of `address`. None if it has other parts, except the peer there."""
    place = place_of(address)
    return (place.host, place.port) if place is not None and place.is_ip else None


def place_in(packed: bytes) -> tuple[str, int] | None:
    """`host_and_port` of what a peer has sent as an address. It takes microseconds, whatever that is."""
    end = _IP_ENDS.get(packed[:1], 0)
    tcp, rest = packed[end : end + 3], packed[end + 3 :]
    if not end or len(tcp) < 3 or tcp[0] != _TCP:
        return None
    if rest and (rest[:2] != _P2P or len(rest) < 3 or len(rest) != 3 + rest[2]):
        return None
    return str(ipaddress.ip_address(packed[1:end])), int.from_bytes(tcp[1:], "big")


def may_be_dialled(host: str, port: int, own: str) -> bool:
    """Whether we dial this address because a stranger calls it its own. Our IP address is `own`.

    Any public address of the same version may be dialled. An address in a private network, on a link or on this machine
    may be dialled only if the stranger is there, too.
    """
    theirs, ours = ipaddress.ip_address(host), ipaddress.ip_address(own)
    scope = _scope(theirs)
    return port > 0 and theirs.version == ours.version and scope is not None and scope in ("public", _scope(ours))


def _scope(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if ip.is_loopback:
        return "machine"
    if ip.is_link_local:
        return "link"
    if ip.is_multicast or ip.is_unspecified or ip.is_reserved or getattr(ip, "ipv4_mapped", None):
        return None
    return "public" if ip.is_global else "private"


def parse_listen(address: str) -> Multiaddr:
    try:
        parsed = Multiaddr(address)
        protocols = [protocol.name for protocol in parsed.protocols()]
    except (MultiaddrError, ValueError) as error:
        raise ConfigError(
            f"--listen {address!r} is not a multiaddr ({error}): write for example {LISTEN_ANY_LOOPBACK}"
        ) from error
    if len(protocols) != 2 or protocols[0] not in ("ip4", "ip6") or protocols[1] != "tcp":
        raise ConfigError(f"--listen {address!r}: only /ip4/ADDRESS/tcp/PORT and /ip6/ADDRESS/tcp/PORT are supported")
    return parsed


def parse_announced(address: str) -> Multiaddr:
    """Raises ConfigError for an address that nobody could dial."""
    form = "write where others reach you, as /ip4/ADDRESS/tcp/PORT, /ip6/ADDRESS/tcp/PORT or /dns/NAME/tcp/PORT"
    try:
        parsed = Multiaddr(address)
        protocols = [protocol.name for protocol in parsed.protocols()]
    except (MultiaddrError, ValueError) as error:
        raise ConfigError(f"--announce {address!r} is not a multiaddr ({error}): {form}") from error
    if "p2p-circuit" in protocols:
        raise ConfigError(f"--announce {address!r}: give the relay's own address to --relay")
    if protocols[:1] not in ([name] for name in HOSTS) or protocols[1:] not in (["tcp"], ["tcp", "p2p"]):
        raise ConfigError(f"--announce {address!r}: {form}")
    host, port = parsed.value_for_protocol(protocols[0]), int(parsed.value_for_protocol("tcp"))
    if protocols[0] in ("ip4", "ip6") and ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"--announce {address!r}: nobody can dial {host}; {form}")
    if not port:
        raise ConfigError(f"--announce {address!r}: nobody can dial port 0; give the one that is forwarded to you")
    return parsed


def of_peer(address: Multiaddr, peer: PeerId) -> Multiaddr:
    """`address`, which `parse_announced` returned, ending in `/p2p/PEER`. Raises ConfigError if it names another
    peer.
    """
    if "p2p" not in (protocol.name for protocol in address.protocols()):
        address = with_peer(address, peer)
    elif (named := address.value_for_protocol("p2p")) != peer:
        raise ConfigError(
            f"--announce {address}: this node is {peer}, and not {named}; leave /p2p/{named} out,"
            " or give the file of that peer's key with --identity"
        )
    if len(str(address)) > ADDRESS_CHARS:
        raise ConfigError(
            f"--announce {address}: at most {ADDRESS_CHARS} characters are told to others; name it shorter"
        )
    return address


def with_peer(address: Multiaddr, peer: PeerId) -> Multiaddr:
    return address.encapsulate(Multiaddr(f"/p2p/{peer}"))
