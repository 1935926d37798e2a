"""Servers that answer, by their address groups: the votes for a precision, where a swarm announces several.

An announcement costs its author nothing. So what it says has no vote before its server has been connected to. Clients
ask only where several precisions are whole; newcomers that choose one ask the servers of each.
"""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from llmnode.core.alternating import alternating
from llmnode.core.peers.whereabouts import in_turns
from llmnode.core.placement.claims import of_weights
from llmnode.core.placement.precisions import BACKERS, ServedPrecision, backing_servers, served_precisions
from llmnode.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo, Precision, PrecisionWish
    from llmnode.swarm.membership import Swarm

MOST_ASKED = 64
"""Servers that are connected to at most, to learn their address groups."""
PATIENCE_S = 1.0
"""Others are asked beside a server that has not answered by then. Its dial goes on: its first packet may be lost."""
LATE_ADDRESSES = 12
"""Late dials go on to this many addresses at most. So half of the dials on a stranger's word (`SHARE_OF_STRANGERS` of
`BudgetPolicy.dials`) is left for those asked next."""


class Backers:
    """The servers of a model in a swarm, and which of them answer. `usable` are those that count now."""

    def __init__(
        self, model: ModelInfo, wish: PrecisionWish, swarm: Swarm, usable: Callable[[], Sequence[Announcement]]
    ) -> None:
        self._model = model
        self._wish = wish
        self._swarm = swarm
        self._usable = usable

    def served(self, met: Mapping[PeerId, str]) -> list[ServedPrecision]:
        """The precisions that are served now. Only servers that were `met` have a vote."""
        return served_precisions(self._model, self._usable(), self._wish, met)

    async def decided(self, timeout_s: float) -> list[ServedPrecision]:
        """The same. If several are served whole, some servers of each are asked first, for this time."""
        served = self.served({})
        whole = {each.precision for each in served if each.is_whole}
        if len(whole) > 1:
            served = self.served(await self._ask(whole, timeout_s, self._is_decided))
        return served

    async def answering(self, precisions: Collection[Precision], timeout_s: float) -> dict[PeerId, str]:
        """Ask servers in two address groups for each block, in each of the `precisions`.

        Returns the address groups of those that answer in this time.
        """
        return await self._ask(precisions, timeout_s, lambda _groups: False)

    async def _ask(
        self, precisions: Collection[Precision], timeout_s: float, is_over: Callable[[Mapping[PeerId, str]], bool]
    ) -> dict[PeerId, str]:
        """Connect to servers of two address groups for each block, in each precision, as far as they answer.

        Returns the address groups of those that do. It may be over sooner.
        """
        by_precision: dict[Precision, list[Announcement]] = {}
        of_model = of_weights(self._usable(), self._model)
        for each in random.sample(of_model, len(of_model)):
            if each.offer.profile.precision in precisions:
                by_precision.setdefault(each.offer.profile.precision, []).append(each)
        met = self._swarm.met_in()
        inquiry = _Inquiry(self._swarm, [in_turns(own, met) for own in by_precision.values()])
        with trio.move_on_after(timeout_s):
            await inquiry.run(is_over)
        return inquiry.groups

    def _is_decided(self, groups: Mapping[PeerId, str]) -> bool:
        first = next(iter(self.served(groups)), None)
        return first is not None and first.precision == self._wish.nearest and first.groups >= BACKERS


@dataclass(slots=True)
class _Dial:
    """A server that has not answered yet."""

    addresses: int
    late_s: float
    """From this time on it is late."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class _Inquiry:
    """Servers are dialled, and further ones beside those that are late. `groups` are those of servers that answer."""

    def __init__(self, swarm: Swarm, by_precision: Iterable[Sequence[Announcement]]) -> None:
        """`by_precision` has the servers of each precision, in the order in which to ask them."""
        self.groups = swarm.connected_in()
        self._swarm = swarm
        self._met = swarm.met_in()
        self._by_precision = [list(own) for own in by_precision]
        self._dials: dict[PeerId, _Dial] = {}
        self._late: set[PeerId] = set()
        self._asked = 0
        self._changed = trio.Event()

    async def run(self, is_over: Callable[[Mapping[PeerId, str]], bool]) -> None:
        """Ask until no further answer is of use, or `is_over` says so."""
        async with trio.open_nursery() as nursery:
            while self._is_open() and not is_over(self.groups):
                for each in self._next():
                    dial = _Dial(len(each.addresses), trio.current_time() + PATIENCE_S)
                    self._dials[each.peer] = dial
                    self._asked += 1
                    nursery.start_soon(self._ask, each, dial)
                if not self._dials:
                    break
                self._changed = trio.Event()
                with trio.move_on_at(min((self._dials[peer].late_s for peer in self._in_time()), default=math.inf)):
                    await self._changed.wait()
                self._note_late()
            nursery.cancel_scope.cancel()

    async def _ask(self, server: Announcement, dial: _Dial) -> None:
        with suppress(PeerError, ConfigError), dial.scope:
            connection = await self._swarm.connect(server.addresses)
            self.groups[connection.peer] = connection.source.group
        del self._dials[server.peer]
        if not dial.scope.cancelled_caught:
            self._late.discard(server.peer)
            if server.peer not in self.groups:
                self._by_precision = [[each for each in own if each is not server] for own in self._by_precision]
        self._changed.set()

    def _is_open(self) -> bool:
        """Whether the answer of any server, asked or not, would be of use."""
        given_up = self._late - self._dials.keys()
        left = [[each for each in own if each.peer not in given_up] for own in self._by_precision]
        return any(backing_servers(own, self.groups, self._met) for own in left)

    def _next(self) -> list[Announcement]:
        in_time = self._in_time()
        chosen = [backing_servers(own, self.groups, self._met, in_time, self._late) for own in self._by_precision]
        # In turn: inventions in one precision do not use up the tries of the others.
        return alternating(chosen)[: MOST_ASKED - self._asked]

    def _in_time(self) -> set[PeerId]:
        return self._dials.keys() - self._late

    def _note_late(self) -> None:
        now_s = trio.current_time()
        late = {peer: dial for peer, dial in self._dials.items() if dial.late_s <= now_s}
        self._late |= late.keys()
        beyond = sum(dial.addresses for dial in late.values()) - LATE_ADDRESSES
        for dial in late.values():  # the oldest first
            if beyond > 0:
                dial.scope.cancel()
                beyond -= dial.addresses
