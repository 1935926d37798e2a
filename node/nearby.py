"""Swarms of the local network, by mDNS: a server is found and finds others; a command without peers finds servers.

A private swarm is never told of, nor looked for.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.errors import single_error
from llmnode.net.mdns import local_networks, open_mdns
from llmnode.node.stopping import run_async
from llmnode.swarm.found_nearby import NOBODY, NOWHERE, describe, find_nearby
from llmnode.swarm.nearby import LocalPeers, find

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from llmnode.core.policy import MdnsPolicy
    from llmnode.net.host import Libp2pNetwork
    from llmnode.net.invite import Invite
    from llmnode.net.mdns import Mdns
    from llmnode.swarm.membership import Swarm

GIVE = "give an INVITE, or --peers ADDRESS as `llmnode serve` prints it"


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
        return run_async(find_nearby, report, GIVE, policy)
