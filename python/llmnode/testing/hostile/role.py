"""A hostile role: peers of a simulated world that do as their author likes. Data, as a `Fault` is."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.testing.network import peer_named

if TYPE_CHECKING:
    import random

    from llmnode.core.ids import PeerId
    from llmnode.testing.world import World


@dataclass(frozen=True, slots=True)
class HostileRole:
    """`peers` peers that do the same, in `groups` address groups."""

    peers: int
    groups: int

    @classmethod
    def draw(cls, rng: random.Random) -> HostileRole:
        """One of this kind, at random."""
        return cls(*cls.draw_peers(rng))

    @classmethod
    def draw_peers(cls, rng: random.Random) -> tuple[int, int]:
        """The number of peers, and of their groups."""
        peers = rng.choice((1, 1, 2, 3))
        return peers, rng.choice((1, peers))

    @property
    def names(self) -> list[str]:
        return [f"{type(self).__name__}{number}" for number in range(self.peers)]

    @property
    def identities(self) -> set[PeerId]:
        return {peer_named(name) for name in self.names}

    def host(self, number: int) -> str:
        """The IP address of one of the peers."""
        return f"9.{zlib.crc32(type(self).__name__.encode()) % 256}.{number % self.groups}.1"

    async def play(self, world: World) -> None:
        """Do it, until cancelled."""
        raise NotImplementedError
