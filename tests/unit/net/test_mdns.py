"""mDNS over a socket in memory: which datagrams are believed, and which interfaces are members of the group."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv4Network
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


class Socket:
    """It receives `datagrams`, each with its host, and then nothing. It notes memberships and counts what is sent."""

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


def be_in(monkeypatch: pytest.MonkeyPatch, *interfaces: int) -> None:
    networks = [LocalNetwork(HOST, IPv4Network("192.168.1.0/24"), each) for each in interfaces]
    monkeypatch.setattr(mdns, "local_networks", lambda: networks)


def hosts_heard(*datagrams: tuple[bytes, str]) -> list[str]:
    """The hosts whose datagrams are heard, in their order, without a moment between these."""

    async def main() -> list[str]:
        sock: Any = Socket(datagrams)
        ours, hosts = Mdns(sock, POLICY), []
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
        ours = Mdns(sock, POLICY)
        for interfaces, members in (((2,), {2}), ((3,), {3}), ((3, 3), {3}), ((), set())):
            be_in(monkeypatch, *interfaces)
            await ours.ask()
            assert sock.members == members
        assert sock.sent == 4, "one question for each network"

    trio.run(main)
