"""A NAT as a function of the packets before and of the time: which packets it lets through, and how it changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from netns.packets import TCP, Endpoint

if TYPE_CHECKING:
    import random

    from netns.packets import Packet

FIRST_PORT, LAST_PORT = 1024, 65535


@dataclass(frozen=True, slots=True)
class Kind:
    """How a NAT chooses outside ports. All let in packets only from an address and port that was talked to (RFC
    4787).
    """

    name: str
    keeps_port: bool
    """Where it is free; else one at random."""
    per_target: bool
    """Another one for each target, so that what one target sees of us is of no use to the next."""

    def __str__(self) -> str:
        return self.name


MASQUERADE = Kind("masquerade", keeps_port=True, per_target=False)
"""The kind of Linux and most home routers."""
PORT_RESTRICTED = Kind("port-restricted", keeps_port=False, per_target=False)
SYMMETRIC = Kind("symmetric", keeps_port=False, per_target=True)
"""The kind of many mobile networks and companies."""


@dataclass(slots=True)
class _Mapping:
    inside: Endpoint
    outside_port: int
    used: float
    talked_to: set[Endpoint] = field(default_factory=set)


class Nat:
    """One NAT. `send` and `receive` rewrite a packet in place; False: it is dropped, without a word."""

    def __init__(
        self, kind: Kind, outside: str, rng: random.Random, *, timeout_s: float = 300.0, adopts: bool = True
    ) -> None:
        """`adopts`: TCP that it has no mapping for gets one though it is under way, as with Linux: its other end then
        sees a stranger, and resets it. Else it is dropped.
        """
        self.kind = kind
        self.outside = outside
        self._rng = rng
        self._timeout_s = timeout_s
        self._adopts = adopts
        self._by_inside: dict[tuple[int, Endpoint, Endpoint | None], _Mapping] = {}
        self._by_outside: dict[tuple[int, int], _Mapping] = {}

    def send(self, packet: Packet, now: float) -> bool:
        """Pass a packet from inside to the world."""
        target = packet.target
        key = (packet.protocol, packet.source, target if self.kind.per_target else None)
        mapping = self._by_inside.get(key)
        if mapping is None or self._is_over(mapping, now):
            if not packet.opens and not (self._adopts and packet.protocol == TCP):
                return False
            self._forget(now)
            port = self._free_port(packet)
            mapping = _Mapping(packet.source, port, now)
            self._by_inside[key] = self._by_outside[packet.protocol, port] = mapping
        mapping.used = now
        mapping.talked_to.add(target)
        packet.source = Endpoint(self.outside, mapping.outside_port)
        return True

    def receive(self, packet: Packet, now: float) -> bool:
        """Pass a packet from the world to inside."""
        mapping = self._by_outside.get((packet.protocol, packet.target.port))
        if mapping is None or self._is_over(mapping, now) or packet.source not in mapping.talked_to:
            return False
        mapping.used = now
        packet.target = mapping.inside
        return True

    def _is_over(self, mapping: _Mapping, now: float) -> bool:
        return now - mapping.used > self._timeout_s

    def _forget(self, now: float) -> None:
        """Frees the ports of mappings that are over."""
        self._by_inside = {key: each for key, each in self._by_inside.items() if not self._is_over(each, now)}
        self._by_outside = {key: each for key, each in self._by_outside.items() if not self._is_over(each, now)}

    def _free_port(self, packet: Packet) -> int:
        inside = packet.source.port
        if self.kind.keeps_port and (packet.protocol, inside) not in self._by_outside:
            return inside
        while True:
            port = self._rng.randint(FIRST_PORT, LAST_PORT)
            if port != inside and (packet.protocol, port) not in self._by_outside:
                return port
