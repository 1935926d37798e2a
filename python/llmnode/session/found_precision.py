"""A router in a precision that the swarm serves, found among those that the user's wish allows.

An announcement costs its author nothing. So if there is a choice, servers count that answer, by their address groups,
and a precision is taken once a position was computed in it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.placement.precisions import ServedPrecision, describe_choice, describe_gaps
from llmnode.core.view import online
from llmnode.errors import NoRoute, PeerError, SwarmError
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router
from llmnode.swarm.backers import Backers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.model import ModelInfo, Precision, PrecisionWish
    from llmnode.core.policy import ClientPolicy
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)


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
    if not any(each.is_whole for each in search.backers.served({})):
        await swarm.look_up(model.digest)
    served = await search.backers.decided(policy.route.connect_timeout_s)
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
        self.backers = Backers(model, wish, swarm, self._usable)

    def router_in(self, precision: Precision) -> Router:
        finder = PeerFinder(replace(self._model, precision=precision), self._pool, self._swarm, self._policy)
        return Router(finder)

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
