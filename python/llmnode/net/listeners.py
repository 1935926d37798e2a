"""The sockets at which a host listens: one version of IP each, and one port for all of them if it can be had.

It does not know what others are told of them: see `addresses.py`.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from libp2p.transport.tcp import tcp
from multiaddr import Multiaddr

from llmnode.errors import ConfigError
from llmnode.net.addresses import own_ips, tcp_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    import trio
    from libp2p.network.swarm import Swarm

ANY_6 = Multiaddr("/ip6/::/tcp/0")

_set_reuse_flags = tcp._set_reuse_flags


async def listen_at(swarm: Swarm, addresses: Sequence[Multiaddr]) -> None:
    """Listen at `addresses`. Those with port 0 share one port where it is free: a user opens one in a firewall.

    py-libp2p is silent where it cannot listen. Raises ConfigError.
    """
    tcp._set_reuse_flags = _set_flags
    shared_port = 0
    for address in addresses:
        host, port = _ip_and_port(address)
        if not port and shared_port:
            same_port = tcp_address(host, shared_port)
            if _why_taken(same_port) is None and await swarm.listen(same_port):
                continue
        if not await swarm.listen(address):
            raise ConfigError(f"cannot listen at {address}: choose another --listen")
        if not port:
            _, shared_port = _ip_and_port(swarm.listeners[str(address)].get_addrs()[0])


def listenable_ips() -> list[str]:
    """The IP addresses of this machine's interfaces; without those of IPv6 if nothing can listen at them."""
    has_6 = _why_taken(ANY_6) is None
    return [str(each) for each in own_ips() if each.version == 4 or has_6]


def check_bindable(address: Multiaddr) -> None:
    """libp2p would share a port that another process holds (SO_REUSEPORT), and is silent where it cannot listen.

    Raises ConfigError.
    """
    if (error := _why_taken(address)) is not None:
        raise ConfigError(f"cannot listen at {address} ({error.strerror}): choose another --listen") from error


def _why_taken(address: Multiaddr) -> OSError | None:
    """Why nobody can listen at `address` now; None if somebody can."""
    host, port = _ip_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def _set_flags(sock: trio.socket.SocketType) -> None:
    """A socket at `::` would take connections of IPv4 as well, and its port at 0.0.0.0 from others."""
    _set_reuse_flags(sock)
    if sock.family == socket.AF_INET6:
        with suppress(OSError):  # on some systems it always is so
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def _ip_and_port(address: Multiaddr) -> tuple[str, int]:
    (_, host), (_, port) = address.items()
    return str(host), int(str(port))
