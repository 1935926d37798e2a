"""Where peers are: in which address groups each of them counts, and in what order groups have turns.

Identities are free, so peers count by address groups. But an announcement names any addresses: a peer that counted in
the group of the first one could choose its group, and a stranger would have a group for each identity. So a peer counts
where we have met it, over a connection that has proved its identity. Before that, its addresses are claims:

- A claim has no vote (`votes`). A stranger can make up any number of claims, and nothing tells them from true ones.
- A claim only costs turns and trust. The peer counts in all groups that it claims, and its turn is that of the group
  where it is latest. A peer that wants to be reached has to claim an address where it is. So all identities at one
  address wait for each other there, whatever else they claim. Peers that we have met come first in a group, and claims
  of others cost them nothing.

All peers behind relays are one group, `RELAYED`: a stranger may have a reservation at each relay of the swarm. Nothing
here opens a connection.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from llmnode.core.address_groups import address_groups
from llmnode.core.ids import PeerId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmnode.core.announcement import Announcement

CIRCUIT = "/p2p-circuit"
"""The part of a multiaddr between those of a relay and of the peer behind it."""
RELAYED = "behind relays"
NOWHERE = "at no IP address"
"""Peers that announce names alone, or nothing, are one group, too."""


def peer_of(address: str) -> PeerId:
    """The id of the peer at a multiaddr, which ends in it."""
    return PeerId(address.rpartition("/p2p/")[2])


@lru_cache(maxsize=4096)
def claimed_group(address: str) -> str:
    """The group of a multiaddr that a peer announces."""
    if CIRCUIT in address:
        return RELAYED
    parts = address.split("/")
    return address_groups(parts[2])[0] if len(parts) > 2 and parts[1] in ("ip4", "ip6") else NOWHERE


def groups_of(announcement: Announcement, met: Mapping[PeerId, str]) -> frozenset[str]:
    """The groups in which a peer counts: the one where it was `met`, or else all that it claims; at least one."""
    if (group := met.get(announcement.peer)) is not None:
        return frozenset((group,))
    return frozenset(map(claimed_group, announcement.addresses)) or frozenset((NOWHERE,))


def votes(peers: Iterable[PeerId], met: Mapping[PeerId, str]) -> frozenset[str]:
    """The groups that speak for something, since peers that were `met` there do."""
    return frozenset(met[peer] for peer in peers if peer in met)


def in_turns(announcements: Sequence[Announcement], met: Mapping[PeerId, str]) -> list[Announcement]:
    """The same peers, in rounds. A group has a place in each round; those that were met come first there.

    A peer that counts in several groups takes one of each, and has the latest of these. So peers that are in `k` groups
    have at most `k` times `r` places in the first `r` rounds, whatever else they announce.
    """
    taken: Counter[str] = Counter()
    rounds: dict[PeerId, int] = {}
    met_first = sorted(announcements, key=lambda each: each.peer not in met)
    for each in met_first:
        groups = groups_of(each, met)
        rounds[each.peer] = max(taken[group] for group in groups)
        taken.update(groups)
    return sorted(met_first, key=lambda each: rounds[each.peer])
