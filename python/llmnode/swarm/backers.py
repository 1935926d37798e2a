"""Servers that answer, by their address groups: the votes for a precision, where a swarm announces several.

An announcement costs its author nothing. So what it says has no vote before its server has been connected to. Clients
ask only where several precisions are whole; newcomers that choose one ask the servers of each.
"""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING

import trio

from llmnode.core.placement.claims import of_weights
from llmnode.core.placement.precisions import BACKERS, ServedPrecision, backing_servers, served_precisions
from llmnode.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo, Precision, PrecisionWish
    from llmnode.swarm.membership import Swarm

MOST_ASKED = 64
"""Servers that are connected to at most, to learn their address groups."""


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
        """The address groups of those that answer in this time, of servers in two groups for each block of each."""
        return await self._ask(precisions, timeout_s, lambda _groups: False)

    async def _ask(
        self, precisions: Collection[Precision], timeout_s: float, is_over: Callable[[Mapping[PeerId, str]], bool]
    ) -> dict[PeerId, str]:
        """Connect to servers of two address groups for each block, in each precision, as far as they answer.

        Returns the address groups of those that do. It may be over as soon as enough have answered.
        """
        groups = self._swarm.connected_in()
        asked: set[PeerId] = set()
        with trio.move_on_after(timeout_s):
            while len(asked) < MOST_ASKED and not is_over(groups):
                chosen = self._next(precisions, asked, groups)[: MOST_ASKED - len(asked)]
                if not chosen:
                    break
                asked |= {each.peer for each in chosen}
                async with trio.open_nursery() as nursery:

                    async def ask(each: Announcement, nursery: trio.Nursery = nursery) -> None:
                        with suppress(PeerError, ConfigError):
                            connection = await self._swarm.connect(each.addresses)
                            groups[connection.peer] = connection.source.group
                            if is_over(groups):
                                nursery.cancel_scope.cancel()

                    for each in chosen:
                        nursery.start_soon(ask, each)
        return groups

    def _is_decided(self, groups: Mapping[PeerId, str]) -> bool:
        first = next(iter(self.served(groups)), None)
        return first is not None and first.precision == self._wish.nearest and first.groups >= BACKERS

    def _next(
        self, precisions: Collection[Precision], asked: set[PeerId], groups: Mapping[PeerId, str]
    ) -> list[Announcement]:
        by_precision: dict[Precision, list[Announcement]] = {}
        of_model = of_weights(self._usable(), self._model)
        for each in random.sample(of_model, len(of_model)):
            precision = each.offer.profile.precision
            if precision in precisions and (each.peer in groups or each.peer not in asked):
                by_precision.setdefault(precision, []).append(each)
        met = self._swarm.met_in()
        chosen = [backing_servers(own, groups, met) for own in by_precision.values()]
        # In turn: inventions in one precision do not use up the tries of the others.
        return [each for in_turn in zip_longest(*chosen) for each in in_turn if each is not None]
