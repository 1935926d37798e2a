"""NATs change packets as they should, without any network: some pass, with new addresses, and checksums stay true."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from netns.nat import MASQUERADE, PORT_RESTRICTED, SYMMETRIC, Kind, Nat
from netns.packets import ACK, ICMP, SYN, TCP, UDP, Endpoint, Packet, parse

KINDS = [MASQUERADE, PORT_RESTRICTED, SYMMETRIC]
OUTSIDE = "11.0.0.1"
HOME = Endpoint("10.0.0.2", 5000)
SERVER, OTHER = Endpoint("11.0.0.8", 80), Endpoint("11.0.0.9", 80)
TIMEOUT_S = 60.0
PAYLOAD = b"an odd number of bytes."


def checksum(data: bytes) -> int:
    """RFC 1071, slowly."""
    data += b"\0" * (len(data) % 2)
    total = sum(int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: Endpoint, target: Endpoint, protocol: int = TCP, flags: int = SYN, icmp: int = 8) -> Packet:
    if protocol == TCP:
        start = struct.pack("!HHIIBBHHH", source.port, target.port, 1, 0, 5 << 4, flags, 512, 0, 0)
    elif protocol == UDP:
        start = struct.pack("!HHHH", source.port, target.port, 8 + len(PAYLOAD), 0)
    else:
        start = struct.pack("!BBHHH", icmp, 0, 0, source.port or target.port, 1)
    addresses = socket.inet_aton(source.address) + socket.inet_aton(target.address)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(start) + len(PAYLOAD), 7, 0, 64, protocol, 0) + addresses
    data = bytearray(header + start + PAYLOAD)
    data[10:12] = checksum(header).to_bytes(2)
    at = 20 + {TCP: 16, UDP: 6, ICMP: 2}[protocol]
    data[at : at + 2] = checksum(covered(bytes(data))).to_bytes(2)
    read = parse(data)
    assert read is not None
    return read


def covered(data: bytes) -> bytes:
    """The bytes under the checksum of TCP, UDP or ICMP. For the first two they include addresses, protocol and
    length.
    """
    pseudo = data[12:20] + struct.pack("!HH", data[9], len(data) - 20) if data[9] != ICMP else b""
    return pseudo + data[20:]


def check_sums(packet: Packet) -> None:
    data = bytes(packet.data)
    assert checksum(data[:20]) == 0
    assert checksum(covered(data)) == 0


def new_nat(kind: Kind, seed: int = 0, *, adopts: bool = True) -> Nat:
    return Nat(kind, OUTSIDE, random.Random(seed), timeout_s=TIMEOUT_S, adopts=adopts)


def sent(nat: Nat, target: Endpoint, now: float = 0.0, source: Endpoint = HOME, protocol: int = TCP) -> Endpoint:
    """How the target sees it."""
    out = packet(source, target, protocol)
    assert nat.send(out, now)
    assert out.target == target
    return out.source


def lets_in(nat: Nat, source: Endpoint, target: Endpoint, now: float = 0.0) -> bool:
    return nat.receive(packet(source, target, flags=SYN | ACK), now)


@pytest.mark.parametrize("protocol", [TCP, UDP, ICMP])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_checksums_are_true_after_any_rewriting(kind: Kind, protocol: int) -> None:
    rng = random.Random(1)
    for seed in range(300):
        nat = new_nat(kind, seed)
        server = Endpoint(f"11.9.{rng.randrange(256)}.{rng.randrange(256)}", 0 if protocol == ICMP else 80)
        out = packet(Endpoint("10.0.0.2", rng.randrange(65536)), server, protocol)
        inside = out.source
        check_sums(out)
        assert nat.send(out, 0.0)
        check_sums(out)
        back = packet(server, out.source, protocol, SYN | ACK, icmp=0)
        assert nat.receive(back, 0.0)
        check_sums(back)
        assert back.target == inside


def test_a_udp_packet_without_a_checksum_still_has_none() -> None:
    out = packet(HOME, SERVER, UDP)
    out.data[26:28] = b"\0\0"
    assert new_nat(SYMMETRIC).send(out, 0.0)
    assert out.data[26:28] == b"\0\0"


def test_a_udp_checksum_that_comes_to_0_is_written_as_its_other_zero() -> None:
    out = packet(HOME, SERVER, UDP)
    out.source = Endpoint(OUTSIDE, 0)
    makes_it_0 = int.from_bytes(out.data[26:28])
    out.source = Endpoint(OUTSIDE, makes_it_0)
    assert out.data[26:28] == b"\xff\xff", "0 would say that there is none (RFC 768)"
    check_sums(out)


def test_masquerade_keeps_a_port_that_is_free() -> None:
    nat = new_nat(MASQUERADE)
    assert sent(nat, SERVER) == sent(nat, OTHER) == Endpoint(OUTSIDE, HOME.port)
    neighbour = sent(nat, SERVER, source=Endpoint("10.0.0.3", HOME.port))
    assert neighbour.address == OUTSIDE
    assert neighbour.port != HOME.port


def test_port_restricted_shows_one_port_to_all_and_it_is_another() -> None:
    nat = new_nat(PORT_RESTRICTED)
    assert sent(nat, SERVER) == sent(nat, OTHER)
    assert sent(nat, SERVER).port != HOME.port


def test_symmetric_shows_each_target_another_port() -> None:
    nat = new_nat(SYMMETRIC)
    assert sent(nat, SERVER) != sent(nat, OTHER)
    assert sent(nat, SERVER) == sent(nat, SERVER)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_whom_we_have_talked_to_comes_in(kind: Kind) -> None:
    nat = new_nat(kind)
    assert not lets_in(nat, SERVER, Endpoint(OUTSIDE, HOME.port))
    seen = sent(nat, SERVER)
    assert lets_in(nat, SERVER, seen)
    assert not lets_in(nat, OTHER, seen)
    assert not lets_in(nat, Endpoint(SERVER.address, SERVER.port + 1), seen)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mapping_dies_when_it_is_not_used(kind: Kind) -> None:
    nat = new_nat(kind)
    seen = sent(nat, SERVER)
    assert lets_in(nat, SERVER, seen, now=0.9 * TIMEOUT_S)
    assert lets_in(nat, SERVER, seen, now=1.8 * TIMEOUT_S), "the packet before has kept it alive"
    assert not lets_in(nat, SERVER, seen, now=2.9 * TIMEOUT_S)
    neighbour = sent(nat, SERVER, now=2.9 * TIMEOUT_S, source=Endpoint("10.0.0.3", HOME.port))
    if kind.keeps_port:
        assert neighbour.port == HOME.port, "it is free again"
        assert sent(nat, SERVER, now=2.9 * TIMEOUT_S).port != HOME.port


def test_tcp_that_is_under_way_is_adopted_or_dropped() -> None:
    under_way = [packet(HOME, SERVER, flags=ACK) for _ in range(2)]
    assert new_nat(MASQUERADE).send(under_way[0], 0.0)
    assert not new_nat(MASQUERADE, adopts=False).send(under_way[1], 0.0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x60" + bytes(60),
        bytes(packet(HOME, SERVER).data[:39]),
        bytes(packet(HOME, SERVER).data[:6]) + b"\x00\x10" + bytes(packet(HOME, SERVER).data[8:]),
        bytes(packet(HOME, SERVER, ICMP).data[:20]) + b"\x03" + bytes(20),
    ],
    ids=["nothing", "IPv6", "cut short", "later fragment", "error of ICMP"],
)
def test_what_is_not_read_is_no_packet(data: bytes) -> None:
    assert parse(bytearray(data)) is None
