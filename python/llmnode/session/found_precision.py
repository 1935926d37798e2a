"""A router in a precision that the swarm serves, found among those that the user's wish allows."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.placement.precisions import ServedPrecision, describe_choice, describe_gaps, served_precisions
from llmnode.core.view import online
from llmnode.errors import NoRoute, PeerError
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo, Precision, PrecisionWish
    from llmnode.core.policy import ClientPolicy
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)


async def find_router(
    model: ModelInfo, wish: PrecisionWish, pool: ConnectionPool, swarm: Swarm, policy: ClientPolicy
) -> Router:
    """A router whose peers answer, in the first precision of `served_precisions` that has such peers.

    The precision of `model` does not matter. A choice that is not exact is logged as a warning. Raises NoRoute, or the
    PeerError without which there would be a route.
    """

    def router_in(precision: Precision) -> Router:
        return Router(PeerFinder(replace(model, precision=precision), pool, swarm, policy))

    def served_now() -> list[ServedPrecision]:
        usable = [each for each in online(swarm.view.announcements()) if policy.route.may_use(each.peer)]
        return served_precisions(model, usable, wish)

    if not wish.is_open:
        router = router_in(wish.nearest)
        await router.find_any()
        return router
    served = served_now()
    if not any(each.is_whole for each in served):
        await swarm.look_up(model.digest)
        served = served_now()
    first_error: NoRoute | PeerError | None = None
    for each in [each for each in served if each.is_whole]:
        router = router_in(each.precision)
        try:
            await router.find_any()
        except (NoRoute, PeerError) as error:  # as when those that announce it are gone
            first_error = first_error or error
        else:
            is_as_wished = each.precision == wish.nearest
            log.log(logging.INFO if is_as_wished else logging.WARNING, "%s", describe_choice(each, served, wish))
            return router
    if first_error is not None:
        raise first_error
    if len(served) > 1:
        raise NoRoute(served[0].missing, f"{describe_gaps(served)}: start servers for the missing ones")
    router = router_in(served[0].precision if served else wish.nearest)
    await router.find_any()  # which says why there is none, or waits for one
    return router
