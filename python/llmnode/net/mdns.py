"""mDNS in the private networks of this machine: a node asks for other nodes, answers them, and hears their answers.

It keeps nothing that it hears. It reads a bounded number of datagrams in a second, and believes hosts of its own
networks alone. IPv4 only. Runs in trio, without a thread or a second event loop: it ends where its context ends.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import trio

from llmnode.core.peers.dial_gate import is_local
from llmnode.core.policy import MdnsPolicy
from llmnode.core.rates import Rates
from llmnode.net.addresses import host_and_port, parse_peer
from llmnode.net.mdns_messages import is_about_us, read_message, write_answer, write_question

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmnode.net.mdns_messages import Heard

GROUP, PORT = "224.0.0.251", 5353
HOPS = 255
"""The time to live of what is sent, as RFC 6762 has it."""


@dataclass(frozen=True, slots=True)
class LocalNetwork:
    """A private network that this machine is in, its own address there, and the index of the interface."""

    address: str
    network: ipaddress.IPv4Network
    interface: int


def local_networks() -> list[LocalNetwork]:
    """Those of this machine's interfaces that are up. Public networks are not among them, nor the loopback."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_up = name not in states or states[name].isup
            if each.family != socket.AF_INET or not is_up or not is_local(each.address):
                continue
            network = ipaddress.IPv4Network(f"{each.address}/{each.netmask or '255.255.255.255'}", strict=False)
            with suppress(OSError):  # it has gone meanwhile
                found.append(LocalNetwork(each.address, network, socket.if_nametoindex(name)))
    return found


@asynccontextmanager
async def open_mdns(policy: MdnsPolicy | None = None) -> AsyncIterator[Mdns]:
    """Raises OSError if this machine does not let us hear mDNS."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others of this machine hear it, too
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, HOPS)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        await sock.bind(("", PORT))
        yield Mdns(sock, policy or MdnsPolicy())


class Mdns:
    """Made by `open_mdns`. One task may hear, and others ask and answer."""

    def __init__(self, sock: trio.socket.SocketType, policy: MdnsPolicy) -> None:
        self.policy = policy
        self._sock = sock
        self._name = secrets.token_hex(16)
        self._joined: set[int] = set()
        self._networks: list[LocalNetwork] = []
        self._reads = Rates(policy.burst, policy.per_s)
        self._of_host = Rates(policy.host_burst, policy.host_per_s)

    async def ask(self) -> None:
        """Ask for other nodes, in each network."""
        for each in self._look_at_networks():
            await self._send(write_question(), each)

    async def answer(self, listening: Sequence[str], lifetime_s: int | None = None) -> None:
        """Tell each network at which of the addresses `listening` this node is there. A lifetime of 0 takes it back."""
        lasts_s = self.policy.lifetime_s if lifetime_s is None else lifetime_s
        for each in self._look_at_networks():
            if here := [address for address in listening if _host(address) == each.address][: self.policy.addresses]:
                await self._send(write_answer(self._name, here, lasts_s), each)

    async def hear(self) -> Heard:
        """The next message about llmnode from a host in one of our networks."""
        while True:
            if wait_s := self._reads.wait_s("", trio.current_time()):
                await trio.sleep(wait_s)
            try:
                datagram, (host, *_) = await self._sock.recvfrom(self.policy.datagram_bytes + 1)
            except OSError:  # an interface went, say
                continue
            finally:
                self._reads.count("", trio.current_time())
            if len(datagram) > self.policy.datagram_bytes or not is_about_us(datagram) or not self._is_near(host):
                continue
            if not self._of_host.take(host, trio.current_time()):
                continue
            if (heard := read_message(datagram, host, self.policy)) is not None:
                return heard

    def _look_at_networks(self) -> list[LocalNetwork]:
        """Those that there are now: interfaces come and go. One that is made again has another index."""
        self._networks = local_networks()
        here = {each.interface for each in self._networks}
        for interface in self._joined - here:
            with suppress(OSError):
                self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP, _member(interface))
        self._joined &= here
        for interface in here - self._joined:
            with suppress(OSError):  # it has no multicast
                self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, _member(interface))
                self._joined.add(interface)
        return [each for each in self._networks if each.interface in self._joined]

    def _is_near(self, host: str) -> bool:
        return any(ipaddress.IPv4Address(host) in each.network for each in self._networks)

    async def _send(self, message: bytes, network: LocalNetwork) -> None:
        with suppress(OSError):  # the interface is down, or has no route
            self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(network.address))
            await self._sock.sendto(message, (GROUP, PORT))


def _member(interface: int) -> bytes:
    """The `ip_mreqn` of membership in the group at the interface of this index."""
    return struct.pack("@4s4si", socket.inet_aton(GROUP), socket.inet_aton("0.0.0.0"), interface)


def _host(address: str) -> str | None:
    place = host_and_port(parse_peer(address).addrs[0])
    return place[0] if place else None
