"""Swarms of the local network, by mDNS: a server is found and finds others; a command without peers finds servers.

A private swarm is never told of, nor looked for.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import is_local
from llmnode.core.texts.visible import printable
from llmnode.core.view import online
from llmnode.errors import ConfigError, single_error
from llmnode.net.mdns import local_networks, open_mdns
from llmnode.swarm.nearby import LocalPeers, find

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.policy import MdnsPolicy
    from llmnode.net.host import Libp2pNetwork
    from llmnode.net.invite import Invite
    from llmnode.net.mdns import Mdns
    from llmnode.swarm.membership import Swarm

MODELS_TOLD, SPANS_TOLD = 5, 8
"""The models of a swarm that one line names, and the spans of each."""
NOBODY = "no node of llmnode answers in this network (mDNS)"
RISK = "anybody in this network may run one, and servers can read text that goes through them; --peers names yours"
NOWHERE = "this machine is in no private IPv4 network, where mDNS could find nodes"


@asynccontextmanager
async def living_nearby(
    network: Libp2pNetwork, swarm: Swarm, report: Callable[[str], None], *, looks: bool, serves: trio.Event
) -> AsyncIterator[None]:
    """Be found in the local network, once the node `serves`, for as long as the context lasts.

    A node that `looks` has met those that it finds at once before the context begins, and meets others later.
    """
    async with AsyncExitStack() as stack:
        mdns = None
        try:
            mdns = await stack.enter_async_context(open_mdns())
        except OSError as error:
            report(f"mDNS does not work here ({error.strerror}): other machines need --peers to find this node")
        if mdns is not None:
            local = LocalPeers(mdns, network, swarm, looks=looks, serves=serves)
            if not local_networks():
                report(NOWHERE)
            elif looks:
                await _join_nearby(mdns, local, swarm, report)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            nursery.start_soon(local.run)
        yield


async def _join_nearby(mdns: Mdns, local: LocalPeers, swarm: Swarm, report: Callable[[str], None]) -> None:
    report("looking for other nodes in this network (mDNS)")
    await local.meet_first(await find(mdns))
    found = swarm.view.announcements()
    joined = f"joining the swarm that mDNS has found in this network: {describe(found)}"
    report(joined if found else f"{NOBODY}: this one begins a swarm that others there find without flags")


def find_swarm(report: Callable[[str], None], policy: MdnsPolicy | None = None) -> Invite:
    """The peers of a public swarm in the local network; `report` is told which. Raises ConfigError if there is none."""
    with single_error():
        return trio.run(_find_swarm, report, policy)


async def _find_swarm(report: Callable[[str], None], policy: MdnsPolicy | None) -> Invite:
    from llmnode.core.policy import LinkPolicy
    from llmnode.net.invite import Invite
    from llmnode.swarm.join import join_swarm

    if not local_networks():
        raise ConfigError(f"no peers are named, and {NOWHERE}: {GIVE}")
    report("no peers are named: looking for a swarm in this network (mDNS)")
    try:
        async with open_mdns(policy) as mdns:
            found = await find(mdns)
            if not found:
                raise ConfigError(f"no peers are named, and {NOBODY}: {GIVE}; or begin a swarm: `llmnode serve`")
            async with join_swarm(_flat(found), LinkPolicy(), is_near=True) as (_, swarm):
                announced = swarm.view.announcements()
            if unheard := _in_private_networks(announced) - {PeerId(each[0].rpartition("/")[2]) for each in found}:
                found += await find(mdns, unheard)  # a private address is dialled if mDNS names it
    except OSError as error:
        raise ConfigError(f"no peers are named, and mDNS does not work here ({error.strerror}): {GIVE}") from error
    report(f"found by mDNS: {describe(announced)}; {RISK}")
    return Invite(_flat(found), is_near=True)


def _flat(found: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(address for addresses in found for address in addresses)


def _in_private_networks(announced: Sequence[Announcement]) -> set[PeerId]:
    """Servers that only those in their network reach."""
    return {each.peer for each in online(announced) if any(is_local(one.split("/")[2]) for one in each.addresses)}


GIVE = "give an INVITE, or --peers ADDRESS as `llmnode serve` prints it"


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
