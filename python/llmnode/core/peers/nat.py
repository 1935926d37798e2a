"""The kind of a node's NAT, judged by how others see the node. It holds values alone; `net/reach.py` asks the peers.

The kinds are those that decide how two nodes can meet (RFC 4787, section 4.1, with its words in brackets).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llmnode.core.ids import PeerId


class Nat(StrEnum):
    NONE = "no NAT"
    STEADY = "a NAT that keeps one port for all peers"
    """Peers that both know of each other's port can meet by hole punching (endpoint-independent mapping)."""
    SYMMETRIC = "a NAT that takes another port for each peer (symmetric)"
    """Nobody can know the port that it will take: only a relay helps (address-dependent mapping)."""
    SOME = "a NAT"
    """Only one peer says how it sees us, or all are at one host."""


class Reached(StrEnum):
    YES = "yes"
    NO = "no"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Sight:
    """How one peer, at `peer_host`, sees a connection of ours, and whether it could dial us: at `reached_at`, if so."""

    peer: PeerId
    peer_host: str
    host: str
    port: int
    reached: Reached = Reached.NOT_TRIED
    reached_at: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """The verdict of several sights. `host` is our address as most see it."""

    nat: Nat
    reached: Reached
    host: str
    port: int
    reached_at: str


def judge(sights: Sequence[Sight], own: Collection[str]) -> Reach | None:
    """Judge `sights` of connections from one port of ours; `own` are our IP addresses. None if nobody has seen us.

    A peer that reaches us is believed before one that does not: the other one's own network may have prevented it.
    """
    if not sights:
        return None
    hosts = [sight.host for sight in sights]
    first = max(sights, key=lambda sight: (hosts.count(sight.host), -sights.index(sight)))
    places = {(sight.host, sight.port) for sight in sights}
    if first.host in own:
        nat = Nat.NONE
    elif len(places) > 1:
        nat = Nat.SYMMETRIC
    else:
        nat = Nat.STEADY if len({sight.peer_host for sight in sights}) > 1 else Nat.SOME
    at = next((sight.reached_at for sight in sights if sight.reached is Reached.YES), "")
    tried = any(sight.reached is Reached.NO for sight in sights)
    reached = Reached.YES if at else Reached.NO if tried else Reached.NOT_TRIED
    return Reach(nat, reached, first.host, first.port, at)
