"""The socket below a connection of py-libp2p, and its two ends; and the IP addresses of host names."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libp2p.abc import IRawConnection

RESOLVE_S = 3.0
"""A name that is not resolved in this time is announced without its IP addresses."""
FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


def socket_of(raw: IRawConnection) -> trio.socket.SocketType | None:
    """The socket of a TCP connection; None for anything else, such as a connection through a relay."""
    if isinstance(raw, RawConnection) and isinstance(raw.stream, TrioTCPStream):
        return raw.stream.stream.socket
    return None


def local_address(raw: IRawConnection) -> tuple[str, int] | None:
    """The IP address and port of our end; None if it is no socket, or not any more."""
    sock = socket_of(raw)
    try:
        return None if sock is None else sock.getsockname()[:2]
    except OSError:
        return None


def remote_address(raw: IRawConnection) -> tuple[str, int] | None:
    """The same of the other end. py-libp2p knows it for IPv4 alone, though then also when it is closed."""
    if (address := raw.get_remote_address()) is not None:
        return address
    sock = socket_of(raw)
    try:
        return None if sock is None else sock.getpeername()[:2]
    except OSError:
        return None


async def ips_of(protocol: str, host: str) -> list[str]:
    """The IP addresses of a host name of this protocol of multiaddrs, in the system's order; an IP address itself.

    Raises OSError for a name that the system does not know, UnicodeError for one that is none.
    """
    if protocol not in FAMILIES:
        return [host]
    found = await trio.socket.getaddrinfo(host, None, FAMILIES[protocol], socket.SOCK_STREAM)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


async def resolved(address: Multiaddr) -> list[Multiaddr]:
    """The same with the IP addresses of its host name, as `ips_of`; itself alone if it has no name."""
    first = next(iter(address.protocols())).name
    if first not in FAMILIES:
        return [address]
    name = address.value_for_protocol(first)
    ips = [f"/ip{6 if ':' in each else 4}/{each}" for each in await ips_of(first, name)]
    return [Multiaddr(str(address).replace(f"/{first}/{name}", each, 1)) for each in ips]


async def with_ips(addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
    """The same, and then the IP addresses of their names: nobody dials a name that a stranger announces."""
    found: dict[Multiaddr, None] = dict.fromkeys(addresses)
    for address in addresses:
        with trio.move_on_after(RESOLVE_S), contextlib.suppress(OSError, UnicodeError):
            found |= dict.fromkeys(await resolved(address))
    return list(found)
