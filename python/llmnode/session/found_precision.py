"""A router in a precision that the swarm serves, found among those that the user's wish allows.

An announcement costs its author nothing. So if there is a choice, servers count that answer, by their address groups,
and a precision is taken once a position was computed in it.
"""

from __future__ import annotations

import logging
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.placement.claims import of_weights
from llmnode.core.placement.precisions import (
    BACKERS,
    ServedPrecision,
    backing_servers,
    describe_choice,
    describe_gaps,
    served_precisions,
)
from llmnode.core.view import online
from llmnode.errors import ConfigError, NoRoute, PeerError, SwarmError
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo, Precision, PrecisionWish
    from llmnode.core.policy import ClientPolicy
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)

MOST_ASKED = 64
"""Servers that are connected to at most, to learn their address groups."""


async def find_router(
    model: ModelInfo, wish: PrecisionWish, pool: ConnectionPool, swarm: Swarm, policy: ClientPolicy
) -> Router:
    """A router whose peers answer, in the first precision of `served_precisions` that has such peers.

    If several are served whole, it is the first one in which a position was computed; if none was, the first one whose
    peers answer. The precision of `model` does not matter. A choice that is not exact is logged as a warning. Raises
    NoRoute, or the PeerError without which there would be a route.
    """
    search = _Search(model, wish, pool, swarm, policy)
    if not wish.is_open:
        router = search.router_in(wish.nearest)
        await router.find_any()
        return router
    served = search.served_now()
    if not any(each.is_whole for each in served):
        await swarm.look_up(model.digest)
        served = search.served_now()
    if sum(each.is_whole for each in served) > 1:
        served = search.served_now(await search.ask_backers())
    if (found := await search.first_of(served)) is not None:
        return found
    if len(served) > 1:
        raise NoRoute(served[0].missing, f"{describe_gaps(served)}: start servers for the missing ones")
    router = search.router_in(served[0].precision if served else wish.nearest)
    await router.find_any()  # which says why there is none, or waits for one
    return router


class _Search:
    """Looks for a precision in which the swarm serves the model."""

    def __init__(
        self, model: ModelInfo, wish: PrecisionWish, pool: ConnectionPool, swarm: Swarm, policy: ClientPolicy
    ) -> None:
        self._model = model
        self._wish = wish
        self._pool = pool
        self._swarm = swarm
        self._policy = policy

    def router_in(self, precision: Precision) -> Router:
        finder = PeerFinder(replace(self._model, precision=precision), self._pool, self._swarm, self._policy)
        return Router(finder)

    def served_now(self, groups: Mapping[PeerId, str] | None = None) -> list[ServedPrecision]:
        return served_precisions(self._model, self._usable(), self._wish, groups)

    async def first_of(self, served: Sequence[ServedPrecision]) -> Router | None:
        """The first one that works. Raises as `find_router` if none answers, and returns None if none is whole."""
        whole = [each for each in served if each.is_whole]
        answering: tuple[ServedPrecision, Router] | None = None
        failed: dict[Precision, str] = {}
        first_error: NoRoute | PeerError | None = None
        for each in whole:
            router = self.router_in(each.precision)
            try:
                await router.find_any()
            except (NoRoute, PeerError) as error:  # as when those that announce it are gone
                first_error = first_error or error
                failed[each.precision] = str(error)
                continue
            if len(whole) == 1 or (reason := await self._why_it_fails(router)) is None:
                return self._taken(each, router, served, failed)
            failed[each.precision] = reason
            answering = answering or (each, router)
        if answering is not None:  # all servers may be full
            chosen, router = answering
            return self._taken(chosen, router, served, {})
        if first_error is not None:
            raise first_error
        return None

    async def ask_backers(self) -> dict[PeerId, str]:
        """Connect to servers of two address groups for each block, in each precision, as far as they answer.

        Returns the address groups of those that do. It is over as soon as the best precision is known to have them.
        """
        groups: dict[PeerId, str] = {}
        asked: set[PeerId] = set()
        with trio.move_on_after(self._policy.route.connect_timeout_s):
            while len(asked) < MOST_ASKED and not self._is_decided(groups):
                chosen = self._next_backers(asked, groups)[: MOST_ASKED - len(asked)]
                if not chosen:
                    break
                asked |= {each.peer for each in chosen}
                async with trio.open_nursery() as nursery:

                    async def ask(each: Announcement, nursery: trio.Nursery = nursery) -> None:
                        with suppress(PeerError, ConfigError):
                            connection = await self._pool.connect(each.addresses)
                            groups[connection.peer] = connection.source.group
                            if self._is_decided(groups):
                                nursery.cancel_scope.cancel()

                    for each in chosen:
                        nursery.start_soon(ask, each)
        return groups

    def _is_decided(self, groups: Mapping[PeerId, str]) -> bool:
        first = next(iter(self.served_now(groups)), None)
        return first is not None and first.precision == self._wish.nearest and first.groups >= BACKERS

    def _next_backers(self, asked: set[PeerId], groups: Mapping[PeerId, str]) -> list[Announcement]:
        by_precision: dict[Precision, list[Announcement]] = {}
        whole = {each.precision for each in self.served_now() if each.is_whole}
        of_model = of_weights(self._usable(), self._model)
        for each in random.sample(of_model, len(of_model)):
            precision = each.offer.profile.precision
            if precision in whole and (each.peer in groups or each.peer not in asked):
                by_precision.setdefault(precision, []).append(each)
        return [each for own in by_precision.values() for each in backing_servers(own, groups)]

    async def _why_it_fails(self, router: Router) -> str | None:
        """Have one position computed. None if that goes well."""
        timeout_s = self._policy.route.open_patience_s
        with trio.move_on_after(timeout_s):
            try:
                await router.try_out()
            except (PeerError, SwarmError) as error:
                return str(error)
            return None
        return f"no answer in {timeout_s:g} s"

    def _taken(
        self,
        chosen: ServedPrecision,
        router: Router,
        served: Sequence[ServedPrecision],
        failed: Mapping[Precision, str],
    ) -> Router:
        is_as_wished = chosen.precision == self._wish.nearest
        text = describe_choice(chosen, served, self._wish, failed)
        log.log(logging.INFO if is_as_wished else logging.WARNING, "%s", text)
        router.finder.others = [each.precision.name for each in served if each.is_whole and each is not chosen]
        return router

    def _usable(self) -> list[Announcement]:
        """Those that take sessions, at peers that the client was not told to leave out."""
        return [each for each in online(self._swarm.view.announcements()) if self._policy.route.may_use(each.peer)]
