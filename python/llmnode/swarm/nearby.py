"""Peers of the local network: a node meets those that answer by mDNS, and answers others. Opens no connection itself.

Anybody in the network may answer anything. So there are limits on the peers of a host, on the peers that wait to be
met, and on those that are met at once; the dial gate has its own.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import PeerId
from llmnode.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from typing import NoReturn

    from llmnode.net.host import Libp2pNetwork
    from llmnode.net.mdns import Mdns
    from llmnode.swarm.membership import Swarm

log = logging.getLogger(__name__)


async def find(mdns: Mdns, wanted: Collection[PeerId] = ()) -> list[tuple[str, ...]]:
    """The addresses of each peer that answers soon; none if nobody does. With `wanted`, of these alone."""
    policy = mdns.policy
    most = min(policy.peers, len(wanted)) if wanted else policy.peers
    found: dict[str, tuple[str, ...]] = {}
    of_host: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ask, mdns)
        with trio.move_on_after(policy.find_s) as scope:
            while len(found) < most:
                heard = await mdns.hear()
                for peer, addresses in heard.peers.items():
                    if peer in found or of_host[heard.host] >= policy.peers_per_host or len(found) == most:
                        continue
                    if wanted and peer not in wanted:
                        continue
                    of_host[heard.host] += 1
                    found[peer] = addresses
                    if not wanted:
                        scope.deadline = min(scope.deadline, trio.current_time() + policy.more_s)
        nursery.cancel_scope.cancel()
    return list(found.values())


async def _ask(mdns: Mdns) -> None:
    began_s = trio.current_time()
    for after_s in mdns.policy.ask_again_s:
        await trio.sleep_until(began_s + after_s)
        await mdns.ask()


class LocalPeers:
    """The peers in one node's local network. A node that `looks` meets them; others are met by those that look."""

    def __init__(self, mdns: Mdns, network: Libp2pNetwork, swarm: Swarm, *, looks: bool, serves: trio.Event) -> None:
        """Others are told of the node once it `serves`: it answers their links."""
        self._mdns = mdns
        self._policy = mdns.policy
        self._network = network
        self._swarm = swarm
        self._looks = looks
        self._serves = serves
        self._asked = trio.Event()
        self._failed = trio.Event()
        self._waiting: dict[str, str] = {}
        """The host of each peer that waits to be met, or is being met."""
        self._to_meet, self._next = trio.open_memory_channel[tuple[str, Sequence[str]]](self._policy.peers)

    async def run(self) -> NoReturn:
        """Answer, and meet those that answer, until cancelled. Others are told at the end."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer)
                if self._looks:
                    nursery.start_soon(self._look)
                    for _ in range(self._policy.at_once):
                        nursery.start_soon(self._meet_all)
                await self._hear()
        finally:
            if self._serves.is_set():
                with trio.move_on_after(self._policy.answer_delay_s, shield=True):
                    await self._mdns.answer(self._network.listening, 0)
        raise AssertionError("it hears until it is cancelled")

    async def meet_first(self, peers: Sequence[Sequence[str]]) -> None:
        """Exchange views with those of `peers` that are there. Silent ones hold it up for `MdnsPolicy.meet_s`."""
        for address in (each for addresses in peers for each in addresses):
            self._network.note_near(address)
        with trio.move_on_after(self._policy.meet_s):
            await self._swarm.meet_all([], peers)

    async def _hear(self) -> None:
        while True:
            heard = await self._mdns.hear()
            if heard.asks:
                self._asked.set()
            if not self._looks:
                continue
            for peer, addresses in heard.peers.items():
                if peer in (*self._waiting, self._network.peer) or PeerId(peer) in self._swarm.view:
                    continue
                if list(self._waiting.values()).count(heard.host) >= self._policy.peers_per_host:
                    break
                with suppress(trio.WouldBlock):  # it will be heard again
                    self._to_meet.send_nowait((peer, addresses))
                    self._waiting[peer] = heard.host

    async def _meet_all(self) -> None:
        async for peer, addresses in self._next:
            log.info("mdns peer=%s", peer)
            try:
                for address in addresses:
                    self._network.note_near(address)
                await self._swarm.meet(*addresses)
            except (PeerError, ConfigError):  # a stranger that answers need not be a node
                self._failed.set()
            del self._waiting[peer]

    async def _look(self) -> None:
        """Now and then, and sooner if a peer could not be met: it may be there again."""
        again_s = self._policy.look_again_s
        while True:
            self._failed = trio.Event()
            await self._mdns.ask()
            with trio.move_on_after(self._policy.look_every_s) as quiet:
                await self._failed.wait()
            if quiet.cancelled_caught:
                again_s = self._policy.look_again_s
            else:
                await trio.sleep(again_s)
                again_s = min(2 * again_s, self._policy.look_every_s)

    async def _answer(self) -> None:
        """Also without being asked: those that are there already hear of the node (RFC 6762, section 8.3), and so do
        networks that this machine has come into. To answer is to join these.
        """
        await self._serves.wait()
        while True:
            await self._mdns.answer(self._network.listening)
            await trio.sleep(self._policy.answer_every_s)
            with trio.move_on_after(self._policy.look_every_s):
                await self._asked.wait()
            self._asked = trio.Event()
            await trio.sleep(random.uniform(0.2, 1) * self._policy.answer_delay_s)
