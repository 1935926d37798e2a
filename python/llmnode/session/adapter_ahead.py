"""An adapter goes to all servers of a route at once, and not to each when a pass gets there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.errors import NoRoute, PeerError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.route import Hop
    from llmnode.core.span import Span
    from llmnode.session.pass_routes import PassRoutes
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter

SERVERS_AT_ONCE = 4
"""With an uplink of 1 Mbit/s each link then has twice `LinkPolicy.pace_bytes_per_s`, nearly. With eight it has less."""


async def bring_ahead(
    routes: PassRoutes, adapter: Adapter, span: Span, weight: int, unfit: Collection[PeerId] = ()
) -> None:
    """Have the servers of the best route through `span` hold `adapter`, all but the first: a pass is there by now.

    It goes to a few of them at once, in the order of the route, and to none that is `unfit` for the pass. A failure
    here is not reported: the pass meets the same server, and looks for another one.
    """

    async def bring_some(hops: Iterator[Hop], connections: Mapping[PeerId, PeerConnection]) -> None:
        for hop in hops:
            with suppress(PeerError):
                await connections[hop.peer].adapters.bring(adapter, hop.span, routes.finder.policy.passes.base_s)

    with suppress(NoRoute, PeerError):
        route, connections, load = await routes.find(span, unfit, weight)
        routes.loads.take_back(load)
        hops = iter(route[1:])
        async with trio.open_nursery() as nursery:
            for _ in range(SERVERS_AT_ONCE):
                nursery.start_soon(bring_some, hops, connections)
