"""mDNS over a socket in memory: which datagrams are believed, and which interfaces are members of the group."""

from __future__ import annotations

import errno
import socket
import struct
from ipaddress import IPv4Network, IPv6Network
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmnode.core.policy import MdnsPolicy
from llmnode.net import mdns
from llmnode.net.mdns import LocalNetwork, Mdns
from llmnode.net.mdns_messages import write_question

if TYPE_CHECKING:
    from collections.abc import Iterable

POLICY = MdnsPolicy()
HOST, OTHER = "192.168.1.7", "192.168.1.8"
PEER = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"


class Socket:
    """It receives `datagrams`, each with its host, and then nothing. It notes memberships and counts what is sent."""

    family = socket.AF_INET

    def __init__(self, datagrams: Iterable[tuple[bytes, str]] = ()) -> None:
        self._datagrams = list(datagrams)
        self.members: set[int] = set()
        self.sent = 0

    def setsockopt(self, _level: int, option: int, value: bytes) -> None:
        if option == socket.IP_ADD_MEMBERSHIP:
            self.members.add(self._interface(value))
        elif option == socket.IP_DROP_MEMBERSHIP:
            self.members.remove(self._interface(value))

    @staticmethod
    def _interface(member: bytes) -> int:
        group, _, interface = struct.unpack("@4s4si", member)
        assert socket.inet_ntoa(group) == mdns.GROUP
        return int(interface)

    async def sendto(self, _message: bytes, place: tuple[str, int]) -> None:
        assert place == (mdns.GROUP, mdns.PORT)
        self.sent += 1

    async def recvfrom(self, most_bytes: int) -> tuple[bytes, tuple[str, int]]:
        if not self._datagrams:
            await trio.sleep_forever()
        content, host = self._datagrams.pop(0)
        return content[:most_bytes], (host, mdns.PORT)


class SocketOfIPv6(Socket):
    """The same for IPv6. It notes the source of each datagram that is sent."""

    family = socket.AF_INET6

    def __init__(self, datagrams: Iterable[tuple[bytes, str]] = ()) -> None:
        super().__init__(datagrams)
        self.sources: list[tuple[str, int]] = []

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        group, interface = struct.unpack("@16sI", value)
        assert level == socket.IPPROTO_IPV6 and socket.inet_ntop(socket.AF_INET6, group) == mdns.GROUP_6
        (self.members.add if option == socket.IPV6_JOIN_GROUP else self.members.remove)(interface)

    async def sendmsg(
        self,
        _message: list[bytes],
        ancillary: list[tuple[int, int, bytes]],
        _flags: int,
        place: tuple[str, int, int, int],
    ) -> None:
        ((level, option, packed),) = ancillary
        address, interface = struct.unpack("@16sI", packed)
        assert (level, option) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO)
        assert place == (mdns.GROUP_6, mdns.PORT, 0, interface)
        self.sources.append((socket.inet_ntop(socket.AF_INET6, address), interface))


def be_in(monkeypatch: pytest.MonkeyPatch, *interfaces: int) -> None:
    networks = [LocalNetwork(HOST, IPv4Network("192.168.1.0/24"), each) for each in interfaces]
    monkeypatch.setattr(mdns, "local_networks", lambda: networks)


def hosts_heard(*datagrams: tuple[bytes, str]) -> list[str]:
    """The hosts whose datagrams are heard, in their order, without a moment between these."""

    async def main() -> list[str]:
        sock: Any = Socket(datagrams)
        ours, hosts = Mdns([sock], POLICY), []
        await ours.ask()
        with trio.move_on_after(1):
            while True:
                hosts.append((await ours.hear()).host)
        return hosts

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_only_hosts_of_our_own_networks_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    be_in(monkeypatch, 2)
    others = [(write_question(), each) for each in ("8.8.8.8", "192.168.2.7", "127.0.0.1")]
    assert hosts_heard(*others, (write_question(), OTHER)) == [OTHER]


def test_a_datagram_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    be_in(monkeypatch, 2)
    longest = write_question().ljust(POLICY.datagram_bytes, b"\0")
    assert hosts_heard((longest + b"\0", "192.168.1.9"), (longest, OTHER)) == [OTHER]


def test_few_datagrams_of_one_host_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    be_in(monkeypatch, 2)
    flood = [(write_question(), "192.168.1.9")] * (POLICY.host_burst + 1)
    assert hosts_heard(*flood, (write_question(), OTHER)) == ["192.168.1.9"] * POLICY.host_burst + [OTHER]


def test_an_interface_that_is_made_again_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sock: Any = Socket()
        ours = Mdns([sock], POLICY)
        for interfaces, members in (((2,), {2}), ((3,), {3}), ((3, 3), {3}), ((), set())):
            be_in(monkeypatch, *interfaces)
            await ours.ask()
            assert sock.members == members
        assert sock.sent == 4, "one question for each network"

    trio.run(main)


BOTH = [
    LocalNetwork(HOST, IPv4Network("192.168.1.0/24"), 2),
    LocalNetwork("fd00::7", IPv6Network("fd00::/64"), 2),
]


def test_both_versions_of_ip_are_asked_and_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "local_networks", lambda: BOTH)

    async def main() -> None:
        question = write_question()
        far = [(question, each) for each in ("fd00:0:0:1::8", "2001:db8::8", "fe80::8%lan")]
        of_4: Any = Socket([(question, OTHER)])
        of_6: Any = SocketOfIPv6([*far, (question, "fd00::8")])
        ours = Mdns([of_4, of_6], POLICY)
        await ours.ask()
        assert of_4.members == of_6.members == {2}
        assert (of_4.sent, of_6.sources) == (1, [("fd00::7", 2)]), "from the address that others are to believe"
        assert {(await ours.hear()).host for _ in range(2)} == {OTHER, "fd00::8"}
        await ours.answer([f"/ip6/fd00::7/tcp/4001/p2p/{PEER}", f"/ip6/fd00::9/tcp/4001/p2p/{PEER}"])
        assert (of_4.sent, len(of_6.sources)) == (1, 2), "it is there over IPv6 alone"
        monkeypatch.setattr(mdns, "local_networks", list)
        await ours.ask()
        assert of_4.members == of_6.members == set()

    trio.run(main)


def test_without_a_socket_of_ipv6_its_networks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "local_networks", lambda: BOTH)

    async def main() -> None:
        sock: Any = Socket([(write_question(), "fd00::8"), (write_question(), OTHER)])
        ours = Mdns([sock], POLICY)
        await ours.ask()
        assert sock.sent == 1
        assert (await ours.hear()).host == OTHER

    trio.run(main)


def test_a_machine_without_ipv6_hears_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trio.socket.socket

    def only_4(family: int, kind: int) -> trio.socket.SocketType:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    async def main() -> None:
        monkeypatch.setattr(trio.socket, "socket", only_4)
        async with mdns.open_mdns() as ours:
            await ours.ask()

    trio.run(main)


def test_private_networks_of_both_versions_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, host: str, netmask: str | None) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=host, netmask=netmask)

    name = socket.if_indextoname(1)
    addresses = [
        address(socket.AF_INET, HOST, "255.255.255.0"),
        address(socket.AF_INET, "203.0.113.1", "255.255.255.0"),
        address(socket.AF_INET6, "fd00::7", "ffff:ffff:ffff:ffff::"),
        address(socket.AF_INET6, "fd00:1::7", None),
        address(socket.AF_INET6, f"fe80::7%{name}", "ffff:ffff:ffff:ffff::"),
        address(socket.AF_INET6, "2001:db8::7", "ffff:ffff:ffff:ffff::"),
    ]
    monkeypatch.setattr(mdns.psutil, "net_if_addrs", lambda: {name: addresses})
    monkeypatch.setattr(mdns.psutil, "net_if_stats", dict)
    assert mdns.local_networks() == [
        LocalNetwork(HOST, IPv4Network("192.168.1.0/24"), 1),
        LocalNetwork("fd00::7", IPv6Network("fd00::/64"), 1),
        LocalNetwork("fd00:1::7", IPv6Network("fd00:1::7/128"), 1),
    ]


def test_two_nodes_hear_each_other_over_ipv6() -> None:
    """It is real, where this machine is in a private network of IPv6."""
    if not (here := [each for each in mdns.local_networks() if each.network.version == 6]):
        pytest.skip("this machine is in no private network of IPv6")

    async def main() -> None:
        address = f"/ip6/{here[0].address}/tcp/4001/p2p/{PEER}"
        async with mdns.open_mdns() as one, mdns.open_mdns() as other:
            await other.ask()  # to be in the group
            with trio.fail_after(5):
                while True:
                    await one.answer([address])
                    with trio.move_on_after(0.5):
                        while not (heard := await other.hear()).peers:
                            pass
                        break
            assert heard.host == here[0].address
            assert heard.peers == {PEER: (address,)}

    trio.run(main)
