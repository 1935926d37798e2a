"""Joins a swarm without serving: a network that only dials, and a view that stays current. Loads no torch."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import LinkPolicy, SwarmPolicy
from llmnode.errors import single_error
from llmnode.net.directory import open_directory
from llmnode.net.host import open_network
from llmnode.swarm.former_peers import FormerPeers
from llmnode.swarm.membership import Swarm
from llmnode.swarm.pool import ConnectionPool, open_pool
from llmnode.swarm.remembering import recall, remember

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


@asynccontextmanager
async def join_swarm(
    peers: Sequence[str],
    link_policy: LinkPolicy,
    key: bytes | None = None,
    swarm_key: bytes | None = None,
    *,
    is_near: bool = False,
) -> AsyncIterator[tuple[ConnectionPool, Swarm]]:
    """Join as a client: know what the peers at the addresses `peers` know, and stay up to date.

    Our identity is that of `key`, by default a fresh one. `swarm_key` is the key of a private swarm. Peers that are
    only `is_near` are strangers: mDNS has named them, and not the user. They are dialled as such, and not remembered.

    Peers that do not answer are left out. If none does, those of former runs are asked: see `former_peers.py`. Raises
    PeerError if none answers, ConfigError for a malformed address.
    """
    contacts = () if is_near else peers
    known = FormerPeers(contacts, swarm_key)
    with single_error():
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(open_network([], link_policy, key, swarm_key=swarm_key))
            directory = await stack.enter_async_context(open_directory(network, SwarmPolicy()))
            pool = await stack.enter_async_context(open_pool(network))
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            swarm = Swarm(network, pool, SwarmPolicy(), contacts=contacts, directory=directory, roams=False)
            for address in peers if is_near else ():
                network.note_near(address)
            await swarm.meet_all(peers, await recall(known))
            nursery.start_soon(swarm.run)
            nursery.start_soon(remember, swarm, known)
            yield pool, swarm
