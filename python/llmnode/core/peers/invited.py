"""Chooses the peers that an invite names: few, and those that most others can dial. Opens no connection."""

from __future__ import annotations

from enum import IntEnum
from itertools import zip_longest
from typing import TYPE_CHECKING

from llmnode.core.peers.dial_gate import PUBLIC, scope_of
from llmnode.core.peers.whereabouts import claimed_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_PEERS = 4
"""One that answers is enough, and some may be gone by the time that somebody uses the invite."""
MOST_ADDRESSES = 5
"""Those of all these peers. A QR code of them, a key and a model fits into a terminal of 80 columns."""
_CIRCUIT = "/p2p-circuit"


class DialledFrom(IntEnum):
    """The machines that can dial an address, the most first."""

    INTERNET = 0
    NETWORK = 1
    """A private network, or one link."""
    MACHINE = 2
    """None but the peer's own."""


def dialled_from(address: str) -> DialledFrom:
    """A circuit counts as its relay does, and a name of DNS as one of the internet."""
    parts = address.split("/")
    host = parts[2] if len(parts) > 2 else ""
    scope = scope_of(host)
    if scope == "machine" or host.lower() == "localhost":
        return DialledFrom.MACHINE
    is_name = parts[1].startswith("dns") if len(parts) > 1 else False
    return DialledFrom.INTERNET if is_name or scope == PUBLIC else DialledFrom.NETWORK


def widest(addresses: Iterable[str]) -> DialledFrom:
    """From where the best of these is dialled."""
    return min(map(dialled_from, addresses), default=DialledFrom.MACHINE)


def for_others(addresses: Sequence[str]) -> list[str]:
    """The addresses of one peer, without those that only its own machine can dial, unless there are no others."""
    others = [each for each in addresses if dialled_from(each) is not DialledFrom.MACHINE]
    return others or list(addresses)


def choose_invited(peers: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The addresses for an invite, of `peers` that answer now, each with its addresses; the most trusted first.

    They are of at most MOST_PEERS peers, of different address groups first, and each of these is dialled from as far as
    any of `peers` is. Those that need no relay go before the others. A second address of a peer comes after the first
    one of each: an address of a container's network may be among them.
    """
    sorted_each = [sorted(dict.fromkeys(each), key=_cost) for each in peers if each]
    reach = widest(each[0] for each in sorted_each)
    usable = [for_others(each) for each in sorted_each if dialled_from(each[0]) is reach]
    usable.sort(key=lambda each: _CIRCUIT in each[0])
    groups: set[str] = set()
    first: list[list[str]] = []
    rest: list[list[str]] = []
    for each in usable:
        group = claimed_group(each[0])
        (rest if group in groups else first).append(each)
        groups.add(group)
    chosen = [*first, *rest][:MOST_PEERS]
    in_turns = (address for turn in zip_longest(*chosen) for address in turn if address is not None)
    return tuple(in_turns)[:MOST_ADDRESSES]


def _cost(address: str) -> tuple[DialledFrom, bool]:
    return dialled_from(address), _CIRCUIT in address
