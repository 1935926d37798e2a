"""An adapter goes to all servers of a route at once, and not to each when a pass gets there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.errors import NoRoute, PeerError

if TYPE_CHECKING:
    from llmnode.core.route import Hop
    from llmnode.core.span import Span
    from llmnode.session.pass_routes import PassRoutes
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter


async def bring_ahead(routes: PassRoutes, adapter: Adapter, span: Span, weight: int) -> None:
    """Have the servers of the best route through `span` hold `adapter`, all but the first: a pass is there by now.

    A failure here is not reported: the pass meets the same server, and looks for another one.
    """

    async def bring(hop: Hop, connection: PeerConnection) -> None:
        with suppress(PeerError):
            await connection.adapters.bring(adapter, hop.span, routes.finder.policy.passes.base_s)

    with suppress(NoRoute, PeerError):
        route, connections, load = await routes.find(span, (), weight)
        routes.loads.take_back(load)
        async with trio.open_nursery() as nursery:
            for hop in route[1:]:
                nursery.start_soon(bring, hop, connections[hop.peer])
