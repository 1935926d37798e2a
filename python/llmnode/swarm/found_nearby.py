"""Finds a public swarm in the local network by mDNS, for a client that is told no peers, and says what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import is_local
from llmnode.core.policy import LinkPolicy
from llmnode.core.texts.visible import printable
from llmnode.core.view import online
from llmnode.errors import ConfigError
from llmnode.net.invite import Invite
from llmnode.net.mdns import local_networks, open_mdns
from llmnode.swarm.join import join_swarm
from llmnode.swarm.nearby import find

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.policy import MdnsPolicy

MODELS_TOLD, SPANS_TOLD = 5, 8
"""The models of a swarm that one line names, and the spans of each."""
NOBODY = "no node of llmnode answers in this network (mDNS)"
RISK = "anybody in this network may run one, and servers can read text that goes through them; name peers to use yours"
NOWHERE = "this machine is in no private network, where mDNS could find nodes"


async def find_nearby(report: Callable[[str], None], give: str, policy: MdnsPolicy | None = None) -> Invite:
    """The peers of a public swarm in the local network. It waits for servers there that only their network reaches.

    `report` is told in a line what takes long, and which servers were found. Raises ConfigError if there is none, which
    says to `give` something else; PeerError if none answers.
    """
    if not local_networks():
        raise ConfigError(f"no peers are named, and {NOWHERE}: {give}")
    report("no peers are named: looking for a swarm in this network (mDNS)")
    try:
        async with open_mdns(policy) as mdns:
            found = await find(mdns)
            if not found:
                raise ConfigError(f"no peers are named, and {NOBODY}: {give}; or begin a swarm: `llmnode serve`")
            async with join_swarm(_flat(found), LinkPolicy(), is_near=True) as (_, swarm):
                announced = swarm.view.announcements()
            if unheard := _in_private_networks(announced) - {PeerId(each[0].rpartition("/")[2]) for each in found}:
                found += await find(mdns, unheard)  # a private address is dialled if mDNS names it
    except OSError as error:
        raise ConfigError(f"no peers are named, and mDNS does not work here ({error.strerror}): {give}") from error
    report(f"found by mDNS: {describe(announced)}; {RISK}")
    return Invite(_flat(found), is_near=True)


def _flat(found: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(address for addresses in found for address in addresses)


def _in_private_networks(announced: Sequence[Announcement]) -> set[PeerId]:
    """Servers that only those in their network reach."""
    return {each.peer for each in online(announced) if any(is_local(one.split("/")[2]) for one in each.addresses)}


def describe(announcements: Sequence[Announcement]) -> str:
    """The number of servers, the models that they serve, and the blocks."""
    spans: dict[str, dict[str, None]] = {}
    for each in sorted(online(announcements), key=lambda each: each.offer.span):
        spans.setdefault(each.offer.model, {})[str(each.offer.span)] = None
    models = [
        f"{printable(model)} (blocks {_listed(list(of), SPANS_TOLD, 'spans')})" for model, of in sorted(spans.items())
    ]
    servers = f"{len(announcements)} server{'s' * (len(announcements) != 1)}"
    return (
        f"{servers} of {_listed(models, MODELS_TOLD, 'models')}" if models else f"{servers}, none of which serves yet"
    )


def _listed(words: Sequence[str], most: int, kind: str) -> str:
    more = f" and {len(words) - most} other {kind}" if len(words) > most else ""
    return f"{', '.join(words[:most])}{more}"
