"""Next hops that a server is asked to push to: what they announce of themselves may be anything."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.ids import PeerId
from llmnode.core.policy import LinkPolicy, ServePolicy
from llmnode.errors import PeerRefused, PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.node.serve.next_hops import NextHops
from llmnode.swarm.pool import open_pool
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIAR = PeerId("12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo")


@asynccontextmanager
async def next_hops(*addresses: str) -> AsyncIterator[NextHops]:
    """The next hops of a server that has heard of one peer, at `addresses`."""
    async with open_network([], LinkPolicy()) as network, open_pool(network) as pool:
        yield NextHops(pool, lambda peer: addresses if peer == LIAR else None, ServePolicy())


@in_trio
async def test_an_address_that_is_none_is_that_of_a_peer_that_cannot_be_reached() -> None:
    async with next_hops(f"garbage/p2p/{LIAR}") as hops:
        for reason in ("cannot be reached", "could not be reached lately"):
            with pytest.raises(PeerUnreachable, match=reason):
                await hops.find(LIAR, trio.current_time(), again=False)


@in_trio
async def test_nor_is_it_reached_when_it_is_asked_for_again() -> None:
    async with next_hops(f"garbage/p2p/{LIAR}") as hops:
        asked_s = trio.current_time()
        with pytest.raises(PeerRefused, match="being dialled"):
            await hops.find(LIAR, asked_s, again=True)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(PeerUnreachable, match="could not be reached lately"):
            await hops.find(LIAR, asked_s, again=True)


@in_trio
async def test_who_has_announced_nothing_is_not_dialled() -> None:
    async with next_hops() as hops:
        with pytest.raises(PeerUnreachable, match="not known to serve"):
            await hops.find(PeerId("somebody"), trio.current_time(), again=False)


@in_trio
async def test_who_takes_a_link_and_says_nothing_is_not_reached() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as mute:  # it has links, and takes none
        policy = ServePolicy(connect_timeout_s=0.4, dial_patience_s=0.2)
        async with open_network([], LinkPolicy()) as network, open_pool(network) as pool:
            network.vouch(mute.addresses)
            hops = NextHops(pool, lambda _peer: mute.addresses, policy)
            with pytest.raises(PeerRefused, match="being dialled"):
                await hops.find(mute.peer, trio.current_time(), again=False)
            while mute.peer in hops._proving:
                await hops._proving[mute.peer].wait()
            with pytest.raises(PeerUnreachable, match="could not be reached lately"):
                await hops.find(mute.peer, trio.current_time(), again=True)
