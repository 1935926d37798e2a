"""A client that takes the route that it is told, or chooses one as all clients do. It measures steps of a session."""

from __future__ import annotations

import random
import statistics
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from llmnode.client.connect import Client
from llmnode.core.policy import ClientPolicy, LinkPolicy, StandingPolicy
from llmnode.core.view import online
from llmnode.errors import PeerTimeout
from llmnode.models.tensors import to_bytes
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router
from llmnode.swarm.join import join_swarm
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from llmnode.client.connect import ClientParts
    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route
    from llmnode.session.session import InferenceSession

POLICY = ClientPolicy(standing=StandingPolicy(explored_share=0.0))
"""Sessions that explore take other routes on purpose."""
POSITIONS = 96
DIRECT_WITHIN_S = 15.0
SETTLE_WITHIN_S = 90.0
LOOK_S = 0.3
TOKEN = 504


class DirectedFinder(PeerFinder):
    """Takes the route that it is told, if there is one."""

    told: Route = ()

    def _route(self, *arguments: Any) -> Route:  # Any: those of every finder
        return self.told or super()._route(*arguments)


class DirectedClient:
    """A client with a `DirectedFinder`, which has sessions of its own."""

    def __init__(self, client: Client, finder: DirectedFinder, parts: ClientParts) -> None:
        self._client = client
        self._finder = finder
        self._row = to_bytes(parts.ends.embed([TOKEN], 0))

    @property
    def servers(self) -> list[Announcement]:
        return online(self._finder.swarm.view.of_model(self._finder.model.digest))

    @property
    def round_trips_s(self) -> Mapping[PeerId, float]:
        """Those that it has measured."""
        return self._finder.reaching.round_trips_s()

    async def choose(self) -> Route:
        """The route that a session would take now. It also begins to measure round trips."""
        self._finder.told = ()
        route, _ = await self._finder.connected_route({}, POSITIONS)
        return route

    async def until_measured(self, servers: int) -> None:
        """Until all servers have announced their network, and the client has measured the way to all of them."""
        with trio.move_on_after(SETTLE_WITHIN_S):
            while missing := _not_measured(self.servers, servers):  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(LOOK_S)
            while len(self.round_trips_s) < servers:
                await self.choose()
                await trio.sleep(LOOK_S)
            return
        raise PeerTimeout(f"not measured in {SETTLE_WITHIN_S:g} s: {missing or 'round trips of the client'}")

    async def step_s(self, route: Route, steps: int) -> tuple[float, bool]:
        """The median of this number of `steps` through `route`, and whether servers pushed to each other in them."""
        self._finder.told = route
        async with self._client.inference_session(POSITIONS) as session:
            is_direct = await self._until_direct(session, POSITIONS - steps)
            times_s = []
            for _ in range(steps):
                began_s = trio.current_time()
                await session.step(self._row)
                times_s.append(trio.current_time() - began_s)
            assert session.route == route, f"it went through {session.route}, not {route}"
        return statistics.median(times_s), is_direct

    async def _until_direct(self, session: InferenceSession, most: int) -> bool:
        with trio.move_on_after(DIRECT_WITHIN_S):
            for _ in range(most):
                await session.step(self._row)
                if all(hop.direct for hop in session.timings[1:]):
                    return True
        return False


@asynccontextmanager
async def directed_client(peers: Sequence[str], parts: ClientParts, seed: int) -> AsyncIterator[DirectedClient]:
    """A client that has just connected, and has measured nothing."""
    async with join_swarm(peers, LinkPolicy()) as (pool, swarm):
        finder = DirectedFinder(parts.model, pool, swarm, POLICY, random.Random(seed))
        client = Client(replace(parts, model=finder.model), Router(finder), Codec.RAW, POLICY)
        yield DirectedClient(client, finder, parts)


def _not_measured(servers: Sequence[Announcement], number: int) -> list[str]:
    """Their uploads, and the round trips to all servers that may follow on their blocks, as far as they are missing."""
    missing = [] if len(servers) == number else [f"{number - len(servers)} servers"]
    for each in servers:
        end, speed = each.offer.span.end, each.offer.speed
        nexts = {other.peer: other for other in servers if other.offer.span.start <= end < other.offer.span.end}
        missing += [] if speed.upload_kb_per_s else [f"upload of {each.offer.span}"]
        known = {peer for peer, _ in speed.round_trips_us}
        missing += [f"{each.offer.span} to {nexts[peer].offer.span}" for peer in nexts.keys() - known]
    return missing
