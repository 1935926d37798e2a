"""The time until all hops of a route are connected, and the hops that are found not to answer."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import RoutePolicy
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerTimeout, PeerUnreachable
from llmnode.session.router import Router
from llmnode.testing import Conditions
from llmnode.testing.network import MemoryNetwork
from llmnode.testing.watched_finder import WatchedFinder
from simulation.world import MODEL, SPANS, World, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DELAY_S = 0.3
DIAL_S = 3 * DELAY_S


class RecordingFinder(WatchedFinder):
    """Remembers what it has found out of peers."""

    def report(self, error: PeerError) -> None:
        self.__dict__.setdefault("reported", []).append(error)
        super().report(error)


@asynccontextmanager
async def router_of_three(*black_holes: int) -> AsyncIterator[tuple[Router, World]]:
    """The router of a client that has heard of a server for each span, and is connected to none. Some of them do not
    answer.
    """
    async with world(conditions=Conditions(delay_s=DELAY_S)) as swarm:
        swarm.internet.black_holes |= {f"/memory/p2p/peer-{index}" for index in black_holes}
        await swarm.start_relay("relay")
        async with swarm.client(finder=RecordingFinder) as (router, _):
            for index, span in enumerate(SPANS):
                await swarm.start(str(index), span)
            while len(swarm.clients["client"].view.announcements()) < len(SPANS):
                await router.finder.wait_changed()
            yield router, swarm


@simulated
async def test_all_hops_are_dialled_at_once() -> None:
    async with router_of_three() as (router, _):
        began_s = trio.current_time()
        assert [hop.span for hop in await router.find_any()] == SPANS
        assert trio.current_time() - began_s == pytest.approx(DIAL_S, abs=0.01)


@simulated
async def test_a_server_that_claims_another_number_of_blocks_than_the_model_has_is_not_used() -> None:
    """It says that it is the fastest, and that the model has more blocks, all of which it holds."""
    async with router_of_three() as (router, swarm):
        node, blocks = await swarm.start("false", Span(0, MODEL.blocks), said_us=1), MODEL.blocks + 1
        view = swarm.clients["client"].view
        node.swarm.say(replace(node.role.offer(), blocks=blocks, span=Span(0, blocks)))
        while blocks not in {each.offer.blocks for each in view.announcements()}:
            await router.finder.wait_changed()
        assert [hop.span for hop in await router.find_any()] == SPANS
        assert node.peer not in {each.peer for each in router.finder.holders()}


@pytest.mark.parametrize("absent_s", [4.0, 60.0])
@simulated
async def test_who_names_no_address_for_a_while_is_waited_for(absent_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that its relays have lost. It announces at once that they have reserved for it again."""
    plain, lost = MemoryNetwork.addresses, {"peer-1"}

    def addresses(network: MemoryNetwork) -> list[str]:
        return [] if network.peer in lost else plain.__get__(network)

    monkeypatch.setattr(MemoryNetwork, "addresses", property(addresses))
    async with router_of_three() as (router, swarm), trio.open_nursery() as nursery:

        async def come_back() -> None:
            await trio.sleep(absent_s)
            lost.clear()
            swarm.nodes["1"].role.announce()

        nursery.start_soon(come_back)
        began_s = trio.current_time()
        if absent_s > RoutePolicy().open_patience_s:
            with pytest.raises(PeerUnreachable, match="names no address"):
                await router.find_any()
            assert trio.current_time() - began_s < RoutePolicy().open_patience_s + 2
        else:
            assert [hop.span for hop in await router.find_any()] == SPANS
            assert absent_s <= trio.current_time() - began_s < RoutePolicy().open_patience_s, "it asks around"
        nursery.cancel_scope.cancel()


@simulated
async def test_all_who_do_not_answer_are_found_out_together() -> None:
    async with router_of_three(0, 2) as (router, _):
        began_s = trio.current_time()
        with pytest.raises(PeerTimeout, match="no connection in 4 s"):
            await router.find_any()
        assert trio.current_time() - began_s < RoutePolicy().connect_timeout_s + 1
        assert {error.span for error in router.finder.__dict__["reported"]} == {SPANS[0], SPANS[2]}
