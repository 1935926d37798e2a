"""mDNS in the private networks of this machine: a node asks for other nodes, answers them, and hears their answers.

It keeps nothing that it hears. It reads a bounded number of datagrams in a second, and believes hosts of its own
networks alone: those of RFC 1918, and of RFC 4193 where there is IPv6. Each version of IP has a socket of its own. Runs
in trio, without a thread or a second event loop: it ends where its context ends.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
from collections import deque
from contextlib import ExitStack, asynccontextmanager, suppress
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

GROUP, GROUP_6, PORT = "224.0.0.251", "ff02::fb", 5353
HOPS = 255
"""The time to live of what is sent, as RFC 6762 has it."""


@dataclass(frozen=True, slots=True)
class LocalNetwork:
    """A private network that this machine is in, its own address there, and the index of the interface."""

    address: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    interface: int


def local_networks() -> list[LocalNetwork]:
    """Those of this machine's interfaces that are up. Public networks are not among them, nor the loopback."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_up = name not in states or states[name].isup
            if each.family not in (socket.AF_INET, socket.AF_INET6) or not is_up or not is_local(each.address):
                continue
            with suppress(OSError):  # it has gone meanwhile
                network = _network_of(each.address, each.netmask)
                found.append(LocalNetwork(each.address, network, socket.if_nametoindex(name)))
    return found


def _network_of(address: str, netmask: str | None) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """That of an interface with this `address`, which is alone in it without a `netmask`."""
    own = ipaddress.ip_address(address)
    length = int(ipaddress.ip_address(netmask)).bit_count() if netmask else own.max_prefixlen
    return ipaddress.ip_network((own, length), strict=False)


@asynccontextmanager
async def open_mdns(policy: MdnsPolicy | None = None) -> AsyncIterator[Mdns]:
    """Raises OSError if this machine does not let us hear mDNS over IPv4. It may have no IPv6."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM))]
        _share_port(sockets[0])
        sockets[0].setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, HOPS)
        sockets[0].setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        await sockets[0].bind(("", PORT))
        if hasattr(socket, "IPV6_PKTINFO"):  # some systems do not let us choose the address that we send from
            with suppress(OSError):
                sockets.append(await _open_ipv6(stack))
        yield Mdns(sockets, policy or MdnsPolicy())


async def _open_ipv6(stack: ExitStack) -> trio.socket.SocketType:
    """Raises OSError if there is no IPv6."""
    sock = stack.enter_context(trio.socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
    _share_port(sock)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, HOPS)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
    await sock.bind(("::", PORT))
    return sock


def _share_port(sock: trio.socket.SocketType) -> None:
    """Others of this machine hear mDNS, too."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


class Mdns:
    """Made by `open_mdns`. One task may hear, and others ask and answer."""

    def __init__(self, sockets: Sequence[trio.socket.SocketType], policy: MdnsPolicy) -> None:
        """The `sockets` are bound, and of different versions of IP."""
        self.policy = policy
        self._sockets = {6 if each.family == socket.AF_INET6 else 4: each for each in sockets}
        self._received: deque[tuple[bytes, str]] = deque(maxlen=len(sockets))
        self._name = secrets.token_hex(16)
        self._joined: set[tuple[int, int]] = set()
        """The versions of IP and the interfaces at which we are in the group."""
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
                datagram, host = await self._receive()
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

    async def _receive(self) -> tuple[bytes, str]:
        """The next datagram of any socket, and its host. Raises OSError."""
        errors: list[OSError] = []

        async def read(sock: trio.socket.SocketType) -> None:
            try:
                datagram, (host, *_) = await sock.recvfrom(self.policy.datagram_bytes + 1)
                self._received.append((datagram, host))
            except OSError as error:
                errors.append(error)
            nursery.cancel_scope.cancel()

        if not self._received:
            async with trio.open_nursery() as nursery:
                for each in self._sockets.values():
                    nursery.start_soon(read, each)
        if not self._received:
            raise errors[0]
        return self._received.popleft()

    def _look_at_networks(self) -> list[LocalNetwork]:
        """Those that there are now: interfaces come and go. One that is made again has another index."""
        self._networks = [each for each in local_networks() if each.network.version in self._sockets]
        here = {_place(each) for each in self._networks}
        for version, interface in self._joined - here:
            with suppress(OSError):
                self._sockets[version].setsockopt(*_membership(version, interface, joins=False))
        self._joined &= here
        for version, interface in here - self._joined:
            with suppress(OSError):  # it has no multicast
                self._sockets[version].setsockopt(*_membership(version, interface, joins=True))
                self._joined.add((version, interface))
        return [each for each in self._networks if _place(each) in self._joined]

    def _is_near(self, host: str) -> bool:
        ip = ipaddress.ip_address(host.partition("%")[0])
        return any(ip in each.network for each in self._networks)

    async def _send(self, message: bytes, network: LocalNetwork) -> None:
        """From our address in this network: others believe us to be there, and nowhere else."""
        sock = self._sockets[network.network.version]
        with suppress(OSError):  # the interface is down, or has no route
            if network.network.version == 4:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(network.address))
                await sock.sendto(message, (GROUP, PORT))
                return
            source = socket.inet_pton(socket.AF_INET6, network.address) + struct.pack("@I", network.interface)
            place = (GROUP_6, PORT, 0, network.interface)
            await sock.sendmsg([message], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, source)], 0, place)


def _place(network: LocalNetwork) -> tuple[int, int]:
    return network.network.version, network.interface


def _membership(version: int, interface: int, *, joins: bool) -> tuple[int, int, bytes]:
    """The option of membership in the group at the interface of this index: `ip_mreqn`, or `ipv6_mreq`."""
    if version == 4:
        member = struct.pack("@4s4si", socket.inet_aton(GROUP), socket.inet_aton("0.0.0.0"), interface)
        return socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP if joins else socket.IP_DROP_MEMBERSHIP, member
    member = struct.pack("@16sI", socket.inet_pton(socket.AF_INET6, GROUP_6), interface)
    return socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP if joins else socket.IPV6_LEAVE_GROUP, member


def _host(address: str) -> str | None:
    place = host_and_port(parse_peer(address).addrs[0])
    return place[0] if place else None
