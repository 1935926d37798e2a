"""A client that names no precision finds the one that the swarm serves, and another if that one's servers are gone."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.model import EXACT, PRECISIONS, PrecisionWish, wish_named
from llmnode.core.policy import ClientPolicy, LinkPolicy, RoutePolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerError, single_error
from llmnode.node.serve.placing import choose_precision
from llmnode.session.found_precision import find_router
from llmnode.testing import peer_named
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.refusal import refusal_of
from simulation.world import World, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from llmnode.core.ids import PeerId
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.router import Router

WHOLE, FRONT, BACK = Span(0, 6), Span(0, 3), Span(3, 6)
ANY = PrecisionWish()


async def start(swarm: World, name: str, dtype: str, span: Span = WHOLE) -> None:
    """A server of its blocks in `dtype`, which are exact all the same."""
    node = await swarm.start(name, span)
    node.role.model = node.server.model = replace(swarm.model, precision=PRECISIONS[dtype])
    node.role.announce()


@asynccontextmanager
async def finder_of(swarm: World) -> AsyncIterator[PeerFinder]:
    """That of a client that has heard of all servers."""
    async with swarm.client() as (router, _):
        said = {node.peer: node.role.model.profile for node in swarm.nodes.values()}
        while {each.peer: each.offer.profile for each in router.swarm.view.announcements()} != said:
            await router.finder.wait_changed()
        yield router.finder


async def find(finder: PeerFinder, wish: PrecisionWish, policy: ClientPolicy | None = None) -> Router:
    return await find_router(finder.model, wish, finder.pool, finder.swarm, policy or ClientPolicy())


async def found(swarm: World, wish: PrecisionWish) -> Router:
    with single_error():
        async with finder_of(swarm) as finder:
            return await find(finder, wish)


def lie(swarm: World, name: str, *, refuses: bool) -> None:
    """From now on this server takes sessions, and refuses each step, or never answers it."""

    def tamper(_peer: PeerId, frame: Frame) -> Iterable[Frame]:
        if frame.type is not FrameType.RESULT:
            return [frame]
        return [refusal_of(frame, RefusalCode.BAD_MESSAGE, "because")] if refuses else []

    swarm.nodes[name].network.tamper = tamper


@simulated
async def test_exact_if_there_is_a_whole_model_of_it() -> None:
    async with world() as swarm:
        for name, dtype in (("quick", "float32+nf4"), ("exact", "float32")):
            await start(swarm, name, dtype)
        router = await found(swarm, ANY)
        assert router.finder.model.precision == EXACT
        assert [hop.peer for hop in router.route] == [swarm.nodes["exact"].peer]
        assert (await found(swarm, wish_named("float32+nf4"))).finder.model.precision.name == "float32+nf4"


@simulated
async def test_else_what_there_is_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as swarm:
        await start(swarm, "half", "float32", FRONT)
        await start(swarm, "quick", "bfloat16")
        with caplog.at_level(logging.WARNING, "llmnode"):
            router = await found(swarm, ANY)
        assert router.finder.model.precision.name == "bfloat16"
        assert "bfloat16: one server has the whole model in it, and float32 lacks blocks [3, 6)" in caplog.text
        with pytest.raises(NoRoute, match=r"some are held in bfloat16, and float32 is asked for"):
            await found(swarm, wish_named("float32"))


@simulated
async def test_servers_that_the_client_was_told_to_leave_out_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as swarm:
        for name, dtype in (("stranger", "float32"), ("friend", "bfloat16")):
            await start(swarm, name, dtype)
        stranger, friend = (frozenset({swarm.nodes[name].peer}) for name in ("stranger", "friend"))
        async with finder_of(swarm) as finder:
            for route in (RoutePolicy(blocked=stranger), RoutePolicy(allowed=friend)):
                caplog.clear()
                router = await find(finder, ANY, ClientPolicy(route=route))
                assert router.finder.model.precision.name == "bfloat16"
                assert "and nobody serves float32" in caplog.text


@simulated
async def test_servers_that_are_announced_and_gone_do_not_stand_in_the_way() -> None:
    async with world() as swarm:
        for name, dtype in (("gone", "float32"), ("there", "bfloat16")):
            await start(swarm, name, dtype)
        async with finder_of(swarm) as finder:
            swarm.kill("gone")
            await trio.sleep(LinkPolicy().silence_s + 1)  # its link is known to be dead, and its announcement holds
            assert (await find(finder, ANY)).finder.model.precision.name == "bfloat16"
            swarm.kill("there")
            await trio.sleep(LinkPolicy().silence_s + 1)
            with pytest.raises(PeerError, match="gone"):
                await find(finder, ANY)


@simulated
async def test_halves_in_two_precisions_are_told_apart_from_a_whole() -> None:
    async with world() as swarm:
        await start(swarm, "front", "float32", FRONT)
        await start(swarm, "back", "bfloat16", BACK)
        with pytest.raises(NoRoute, match=r"float32 lacks blocks \[3, 6\); bfloat16 lacks blocks \[0, 3\), and"):
            await found(swarm, ANY)


@pytest.mark.parametrize("refuses", [True, False])
@simulated
async def test_a_stranger_that_announces_exact_blocks_and_serves_none_does_not_decide(
    refuses: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as swarm:
        await start(swarm, "honest", "bfloat16")
        await start(swarm, "liar", "float32")
        lie(swarm, "liar", refuses=refuses)
        with caplog.at_level(logging.WARNING, "llmnode"):
            router = await found(swarm, ANY)
        assert router.finder.model.precision.name == "bfloat16"
        assert "and float32, which is announced, did not work: " in caplog.text


@simulated
async def test_many_identities_at_one_address_do_not_outweigh_servers_at_two(caplog: pytest.LogCaptureFixture) -> None:
    """They serve, and say that they are at many addresses. A client that insists on them gets them."""
    async with world() as swarm:
        for name in ("one", "two"):
            await start(swarm, name, "bfloat16")
        for number in range(5):
            swarm.internet.locate(peer_named(f"sybil {number}"), "7.7.7.1")
            await start(swarm, f"sybil {number}", "float32")
        with caplog.at_level(logging.WARNING, "llmnode"):
            router = await found(swarm, ANY)
        assert router.finder.model.precision.name == "bfloat16"
        assert "too few servers of float32 answer at different addresses: name it" in caplog.text
        assert (await found(swarm, wish_named("float32"))).finder.model.precision == EXACT


@simulated
async def test_identities_behind_relays_have_one_vote_whatever_the_relays() -> None:
    """A stranger may have a reservation at each relay of a swarm."""
    async with world() as swarm:
        for name in ("one", "two"):
            await start(swarm, name, "bfloat16")
        for number in range(5):
            peer = peer_named(f"sybil {number}")
            swarm.internet.locate(peer, f"7.7.{number}.1")
            swarm.internet.relay(peer_named("client"), peer)
            await start(swarm, f"sybil {number}", "float32")
        assert (await found(swarm, ANY)).finder.model.precision.name == "bfloat16"


@simulated
async def test_a_newcomer_joins_the_precision_of_servers_that_answer() -> None:
    """Inventions of float32, which is preferred, claim an address group each."""
    async with world() as swarm:
        for name in ("one", "two", "newcomer"):
            await start(swarm, name, "bfloat16")
        for number in range(5):
            await start(swarm, f"sybil {number}", "float32")
            sybil = swarm.nodes[f"sybil {number}"]
            sybil.network.claimed_hosts = [f"7.7.{number}.1"]
            sybil.role.announce()
        newcomer = swarm.nodes["newcomer"]
        said = {node.peer for node in swarm.nodes.values() if node.network.claimed_hosts}
        view = newcomer.swarm.view
        while said != {each.peer for each in view.announcements() if each.addresses[0].startswith("/ip4/7.7")}:
            await newcomer.swarm.wait_changed()
        for number in range(5):
            swarm.kill(f"sybil {number}")
        await trio.sleep(LinkPolicy().silence_s + 1)
        assert (await choose_precision(ANY, swarm.model, newcomer.swarm)).name == "bfloat16"


@simulated
async def test_a_choice_that_turns_out_wrong_is_named_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as swarm:
        for name, dtype in (("honest", "bfloat16"), ("exact", "float32")):
            await start(swarm, name, dtype)
        async with finder_of(swarm) as finder:
            router = await find(finder, ANY)
            assert router.finder.model.precision == EXACT
            swarm.nodes["exact"].server.model = swarm.nodes["honest"].server.model
            with caplog.at_level(logging.WARNING, "llmnode"), pytest.raises(PeerError):
                await router.try_out()
        assert "no session in float32" in caplog.text and "also served: bfloat16" in caplog.text
