"""A forecast against sessions, on a mock clock: links of any lengths, of which all is known by measuring."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack
from itertools import permutations
from statistics import median
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.forecast import ClientPlace, forecast_routes, forecast_session
from llmnode.core.policy import RoutePolicy, StandingPolicy
from llmnode.core.span import Span
from llmnode.core.view import online
from llmnode.node.serve.network_speed import keep_measuring
from llmnode.testing import Conditions, Dialogue, open_world, seeds, simulated
from llmnode.testing.network import peer_named
from llmnode.testing.world import FORWARD_S
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from llmnode.core.route import Route

SPANS = {"a": Span(0, 2), "b": Span(2, 4), "c": Span(4, 6), "d": Span(4, 6)}
MOST_ERROR = 0.02
STEPS, SETTLED = 16, 5
SESSIONS = 12


@pytest.mark.parametrize("most_s", [0.01, 0.1])
@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_session_takes_what_was_forecast_over_the_route_that_was_forecast(seed: int, most_s: float) -> None:
    rng = random.Random(seed)
    places = {name: (rng.uniform(0, most_s), rng.uniform(0, most_s)) for name in (*SPANS, "client")}
    async with open_world(seed) as world, trio.open_nursery() as nursery:
        for one, other in permutations(places, 2):
            distance_s = 0.001 + sum(abs(x - y) for x, y in zip(places[one], places[other], strict=True))
            world.internet.set_conditions(peer_named(one), peer_named(other), Conditions(delay_s=distance_s))
        for name, span in SPANS.items():
            node = await world.start(name, span, said_us=round(1e6 * FORWARD_S / len(span)))
            nursery.start_soon(keep_measuring, node.role, node.swarm, node.network)
        await trio.sleep(30)
        async with world.client() as (router, _peer):
            await router.find_any()
            await trio.sleep(10)
            finder = router.finder
            servers = online(finder.swarm.view.of_model(finder.model.digest))
            session_forecast = forecast_session(finder.model, servers, ClientPlace(finder.reaching.round_trips_s()), 1)
            async with router.open_session(64, Codec.RAW) as session:
                assert list(session.route) == [each.hop for each in session_forecast.hops]
                dialogue, times_s = Dialogue(session, random.Random(seed)), []
                for _ in range(STEPS):
                    began_s = trio.current_time()
                    await dialogue.step(1)
                    times_s.append(trio.current_time() - began_s)
            settled_s = times_s[-SETTLED:]  # before, some results may go by way of the client
            assert session_forecast.step_s == pytest.approx(median(settled_s), rel=MOST_ERROR)
            await trio.sleep(RoutePolicy().asked_again_s)  # servers are asked for their load anew
            began_s = trio.current_time()
            async with router.open_session(64, Codec.RAW):
                assert session_forecast.open_s == pytest.approx(trio.current_time() - began_s, rel=MOST_ERROR)
        nursery.cancel_scope.cancel()


@simulated
async def test_sessions_of_one_client_spread_over_servers_of_the_same_blocks_as_was_forecast() -> None:
    """They are opened at the same moment. One of two servers takes 1.5 times as long as the other one."""
    async with open_world(1) as world, trio.open_nursery() as nursery:
        for name, span in SPANS.items():
            times = 1.5 if name == "d" else 1.0
            node = await world.start(name, span, said_us=round(1e6 * times * FORWARD_S / len(span)))
            node.worker.slower_by_s = (times - 1) * FORWARD_S
            nursery.start_soon(keep_measuring, node.role, node.swarm, node.network)
        await trio.sleep(30)
        async with world.client() as (router, _peer), AsyncExitStack() as stack:
            first, second = [await stack.enter_async_context(router.open_session(64, Codec.RAW)) for _ in range(2)]
            assert first.route != second.route, "a server that has not proved itself gets one session"
            for session in (first, second):
                dialogue = Dialogue(session, random.Random(1))
                for _ in range(StandingPolicy().proven_positions):
                    await dialogue.step(1)
            await trio.sleep(10)
            await stack.aclose()
            taken: Counter[Route] = Counter()

            async def take() -> None:
                opened = await stack.enter_async_context(router.open_session(16, Codec.RAW))
                taken[opened.route] += 1

            async with trio.open_nursery() as openings:
                for _ in range(SESSIONS):
                    openings.start_soon(take)
            finder = router.finder
            servers = online(finder.swarm.view.of_model(finder.model.digest))
            place = ClientPlace(finder.reaching.round_trips_s())
            assert dict(taken) == forecast_routes(finder.model, servers, place, SESSIONS)
            assert len(taken) == 2 and min(taken.values()) >= SESSIONS // 4
        nursery.cancel_scope.cancel()
