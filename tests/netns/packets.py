"""IPv4 packets of TCP, UDP and ICMP echo, whose addresses and ports a NAT can rewrite.

An echo's identifier stands for the port of the sender, on the way there and back; the other side's is 0. Later
fragments, options of IP with addresses in them, and errors of ICMP are not read.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

ICMP, TCP, UDP = socket.IPPROTO_ICMP, socket.IPPROTO_TCP, socket.IPPROTO_UDP
SYN, ACK = 0x02, 0x10
_ECHO_REPLY, _ECHO = 0, 8
_CHECKSUM_AT = {ICMP: 2, TCP: 16, UDP: 6}
_HEADER_BYTES = {ICMP: 8, TCP: 20, UDP: 8}


class Endpoint(NamedTuple):
    """Prints as the address that it is."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class Packet:
    """One IPv4 packet, `data` from its first byte on; rewriting keeps all checksums true. Made by `parse`."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.protocol = data[9]
        self._start = (data[0] & 0x0F) * 4  # of TCP, UDP or ICMP

    @property
    def source(self) -> Endpoint:
        return self._endpoint(12, self._source_port_at)

    @source.setter
    def source(self, source: Endpoint) -> None:
        self._rewrite(12, self._source_port_at, source)

    @property
    def target(self) -> Endpoint:
        return self._endpoint(16, self._target_port_at)

    @target.setter
    def target(self, target: Endpoint) -> None:
        self._rewrite(16, self._target_port_at, target)

    @property
    def opens(self) -> bool:
        """It may begin something: all but TCP that is not a first SYN, and an answer to an echo."""
        if self.protocol == TCP:
            return self.data[self._start + 13] & (SYN | ACK) == SYN
        return self.protocol == UDP or self.data[self._start] == _ECHO

    @property
    def _source_port_at(self) -> int | None:
        if self.protocol == ICMP:
            return self._start + 4 if self.data[self._start] == _ECHO else None
        return self._start

    @property
    def _target_port_at(self) -> int | None:
        if self.protocol == ICMP:
            return self._start + 4 if self.data[self._start] == _ECHO_REPLY else None
        return self._start + 2

    def _endpoint(self, address_at: int, port_at: int | None) -> Endpoint:
        port = 0 if port_at is None else int.from_bytes(self.data[port_at : port_at + 2])
        return Endpoint(socket.inet_ntoa(self.data[address_at : address_at + 4]), port)

    def _rewrite(self, address_at: int, port_at: int | None, to: Endpoint) -> None:
        old, new = bytes(self.data[address_at : address_at + 4]), socket.inet_aton(to.address)
        self.data[address_at : address_at + 4] = new
        self._adjust(10, old, new)
        if self.protocol == ICMP:
            old = new = b""  # its checksum, unlike the others, does not cover the addresses
        if port_at is not None:
            port = to.port.to_bytes(2)
            old, new = old + self.data[port_at : port_at + 2], new + port
            self.data[port_at : port_at + 2] = port
        self._adjust(self._start + _CHECKSUM_AT[self.protocol], old, new)

    def _adjust(self, at: int, old: bytes, new: bytes) -> None:
        """RFC 1624: HC' = ~(~HC + ~m + m')."""
        before = int.from_bytes(self.data[at : at + 2])
        if before == 0 and self.protocol == UDP and at > self._start:
            return  # it has none
        total = _words(new) + (~before & 0xFFFF) - _words(old) + 0xFFFF * (len(old) // 2)
        after = ~_folded(total) & 0xFFFF
        if after == 0 and self.protocol == UDP and at > self._start:
            after = 0xFFFF
        self.data[at : at + 2] = after.to_bytes(2)


def parse(data: bytearray) -> Packet | None:
    """None for what is not read, as a router drops it."""
    if len(data) < 20 or data[0] >> 4 != 4 or data[9] not in _HEADER_BYTES:
        return None
    start = (data[0] & 0x0F) * 4
    is_later_fragment = int.from_bytes(data[6:8]) & 0x1FFF
    if start < 20 or len(data) < start + _HEADER_BYTES[data[9]] or is_later_fragment:
        return None
    if data[9] == ICMP and data[start] not in (_ECHO, _ECHO_REPLY):
        return None
    return Packet(data)


def _words(data: bytes) -> int:
    """The sum of its 16-bit words."""
    return sum(int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2))


def _folded(total: int) -> int:
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
