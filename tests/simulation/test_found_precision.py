"""A client that names no precision finds the one that the swarm serves, and another if that one's servers are gone."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.model import EXACT, PRECISIONS, ModelInfo, Precision, PrecisionWish, wish_named
from llmnode.core.policy import ClientPolicy, LinkPolicy, RoutePolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerError, single_error
from llmnode.node.serve.placing import choose_blocks, choose_precision
from llmnode.session.found_precision import find_router
from llmnode.testing import peer_named
from llmnode.testing.worker import ExactSource
from llmnode.testing.world import FORWARD_S, KV_TOKENS, SAID_BLOCK_US
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.refusal import refusal_of
from simulation.world import World, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.router import Router

WHOLE, FRONT, BACK = Span(0, 6), Span(0, 3), Span(3, 6)
ANY = PrecisionWish()


async def start(swarm: World, name: str, dtype: str, span: Span = WHOLE, *, said_us: int = SAID_BLOCK_US) -> None:
    """A server of its blocks in `dtype`, which are exact all the same."""
    node = await swarm.start(name, span, said_us=said_us)
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
        newcomer.source.fitting = 3
        said = {node.peer for node in swarm.nodes.values() if node.network.claimed_hosts}
        view = newcomer.swarm.view
        while said != {each.peer for each in view.announcements() if each.addresses[0].startswith("/ip4/7.7")}:
            await newcomer.swarm.wait_changed()
        for number in range(5):
            swarm.kill(f"sybil {number}")
        await trio.sleep(LinkPolicy().silence_s + 1)
        for source in (newcomer.source, ExactSource(swarm.model, KV_TOKENS, FORWARD_S)):
            precision, why = await choose_precision(ANY, "auto", swarm.model, source, newcomer.swarm, None)
            assert precision.name == "bfloat16"
            assert "too few servers of float32 answer" in why


async def join(
    swarm: World,
    name: str,
    *,
    fitting: int = 3,
    paces: Mapping[Precision, float] | None = None,
    rates: Mapping[Precision, float] | None = None,
) -> str:
    """A server as `llmnode serve --dtype auto --quant auto` makes it, with this many blocks. Returns what it says.

    In a former run it has measured the `rates` of a block.
    """
    place = await swarm.start_relay(f"place of {name}")
    said = {(node.peer, node.role.offer().profile) for node in swarm.nodes.values()}
    while not said <= {(each.peer, each.offer.profile) for each in place.swarm.view.announcements()}:
        await place.swarm.wait_changed()
    source = ExactSource(swarm.model, KV_TOKENS, FORWARD_S)
    source.fitting, source.paces = fitting, dict(paces or {})

    async def measured(_model: ModelInfo, precisions: Sequence[Precision]) -> Mapping[Precision, float]:
        return {each: rate for each, rate in (rates or {}).items() if each in precisions}

    precision, why = await choose_precision(ANY, "auto", swarm.model, source, place.swarm, measured)
    span = await choose_blocks("auto", replace(swarm.model, precision=precision), source, place.swarm)
    await start(swarm, name, precision.name, span)
    return why


@simulated
async def test_a_newcomer_closes_the_gap_of_a_precision_that_nobody_could_use() -> None:
    """And clients use it. The next one goes where the swarm is weak."""
    async with world() as swarm:
        for name in ("one", "two"):
            await start(swarm, name, "float32")
        for name in ("half", "other half"):
            await start(swarm, name, "bfloat16", FRONT)
        with pytest.raises(NoRoute):
            await found(swarm, wish_named("bfloat16"))
        assert (await join(swarm, "three")).startswith("bfloat16: the swarm lacks blocks [3, 6) in it, and this node")
        router = await found(swarm, wish_named("bfloat16"))
        assert [hop.span for hop in router.route] == [FRONT, BACK]
        assert router.route[1].peer == swarm.nodes["three"].peer
        assert (await join(swarm, "four")).startswith(
            "bfloat16: 3 servers have the whole model in it, and this node may add up to"
        )


@simulated
async def test_a_newcomer_strengthens_the_precision_whose_throughput_it_raises_most() -> None:
    """Unless its device is slow in it, or a gap is too large for it."""
    async with world() as swarm:
        for name in ("one", "two"):
            await start(swarm, name, "float32")
            await start(swarm, f"{name} front", "bfloat16", FRONT)
            await start(swarm, f"{name} back", "bfloat16", BACK, said_us=8000)
        await start(swarm, "sixth", "float16", Span(0, 1))
        why = await join(swarm, "four")
        assert why.startswith("bfloat16: 4 servers have the whole model in it, and this node may add up to")
        assert "; float16 lacks blocks [4, 6) even with this node" in why
        assert swarm.nodes["four"].role.span == BACK, "where those are slow"
        swarm.kill("four")
        why = await join(swarm, "slow", paces={PRECISIONS["bfloat16"]: 0.1})
        assert why.startswith("float32: 2 servers have") and "; this device is slow in bfloat16; " in why


@pytest.mark.parametrize(("rate", "name"), [(None, "float32"), (0.5, "float32"), (2.0, "bfloat16")])
@simulated
async def test_a_newcomer_goes_by_the_speeds_that_it_measured_in_a_former_run(rate: float | None, name: str) -> None:
    async with world() as swarm:
        for number in range(2):
            await start(swarm, f"exact {number}", "float32")
            await start(swarm, f"rounded {number}", "bfloat16")
        rates = {EXACT: 100.0, PRECISIONS["bfloat16"]: 100.0 * rate} if rate else {}
        assert (await join(swarm, "newcomer", rates=rates)).startswith(f"{name}: 2 servers have the whole model in it")


@simulated
async def test_a_boast_of_one_stranger_draws_no_newcomer_and_a_gap_of_its_own_none() -> None:
    async with world() as swarm:
        for name in ("one", "two"):
            await start(swarm, name, "bfloat16")
        swarm.internet.locate(peer_named("fast"), "7.7.7.1")
        swarm.internet.locate(peer_named("slow"), "7.7.7.2")
        await start(swarm, "fast", "float32", FRONT, said_us=1)
        why = await join(swarm, "three")
        assert why.startswith("bfloat16: 2 servers") and "too few servers of float32 answer" in why
        await start(swarm, "slow", "float32", BACK, said_us=10**9)
        for name in ("five", "six"):
            assert (await join(swarm, name)).startswith("bfloat16: "), "its weak blocks are its own matter"


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
