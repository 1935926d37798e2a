"""A node that takes sessions, as the commands and `Node` see it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from llmnode.core.peers.whereabouts import CIRCUIT, in_turns
from llmnode.node.reach import look_by_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.peers.nat import Reach
    from llmnode.core.span import Span
    from llmnode.net.host import Libp2pNetwork
    from llmnode.node.serve.own_figures import OwnFigures
    from llmnode.node.serve.role import Role
    from llmnode.node.serve.server import Server
    from llmnode.ports import WorkerSource
    from llmnode.swarm.membership import Swarm


@dataclass(slots=True)
class RunningNode:
    """A node that takes sessions. Made by `app.open_node`."""

    network: Libp2pNetwork
    model: ModelInfo
    swarm: Swarm
    server: Server
    role: Role
    source: WorkerSource
    figures: OwnFigures
    """The prediction for it, beside what it does."""
    is_private: bool
    """Its swarm has a key."""

    @property
    def peer(self) -> PeerId:
        return self.network.peer

    @property
    def listening(self) -> Sequence[str]:
        """The addresses of this machine where it listens."""
        return self.network.listening

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses that it announces now."""
        return self.network.addresses

    @property
    def span(self) -> Span:
        """The blocks that it serves, or that it is loading."""
        return self.role.span

    @property
    def tensor_bytes(self) -> int:
        """The size of the weights of these blocks, in memory."""
        return self.source.tensor_bytes

    async def follow_addresses(self, report: Callable[[Sequence[str]], None]) -> NoReturn:
        """Announce, and report, when a relay through which we are reached is lost or there again."""
        while True:
            await self.network.wait_addresses_changed()
            self.role.announce()
            report(self.addresses)

    async def change_span(self, span: Span, patience_s: float | None = None) -> None:
        """Serve other blocks, under the same identity: see `Role.change_span`."""
        await self.role.change_span(span, patience_s)

    async def drain(self, patience_s: float, report: Callable[[int], None] = lambda _sessions: None) -> None:
        """Take no new sessions, and leave when those that there are have ended: see `Role.drain`."""
        await self.role.drain(patience_s, report)

    async def look(self) -> list[Reach]:
        """How others reach this node, by the word of peers of the swarm that are reached directly: waits for such.

        Over IPv4 and IPv6, as far as any of them answers.
        """
        while not (addresses := self._direct_peers()):
            await self.swarm.wait_changed()
        return await look_by_version(self.network, addresses)

    def _direct_peers(self) -> list[str]:
        """First those that the user has named. The others are strangers: address groups have turns."""
        announced = self.swarm.view.announcements()
        others = [each for each in random.sample(announced, len(announced)) if each.peer != self.peer]
        in_order = in_turns(others, self.swarm.met_in())
        of_others = (address for each in in_order for address in _first_of_each_version(each.addresses))
        return [each for each in (*self.swarm.contacts, *of_others) if CIRCUIT not in each]


def _first_of_each_version(addresses: Sequence[str]) -> Iterable[str]:
    return {address.split("/")[1]: address for address in reversed(addresses)}.values()
