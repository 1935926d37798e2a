"""Adapters that servers announce: a client names one, need not have it, and gets that one from its holders alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from llmnode.core.adapters import AnnouncedAdapter
from llmnode.core.span import Span
from llmnode.errors import ConfigError, NoRoute, PeerError, SessionLost
from llmnode.session.passes import SwarmPasses
from llmnode.session.served_adapter import with_served_adapter
from llmnode.testing import exact_output, seeds
from llmnode.testing.exact_blocks import exact_gradient, exact_input
from llmnode.testing.network import peer_named
from llmnode.testing.watched_finder import WatchedFinder
from llmnode.testing.world import GENEROUS
from llmnode.wire.payload import Codec
from simulation.adapters import by_sequence, drawn, drawn_adapter, there_and_back
from simulation.test_adapters import LENGTHS, parts_sent_by
from simulation.world import ALL_BLOCKS, MODEL, SPANS, simulated, world

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmnode.session.router import Router
    from llmnode.testing import World
    from llmnode.wire.adapter import Adapter


def named(name: str, adapter: Adapter) -> AnnouncedAdapter:
    return AnnouncedAdapter(name, adapter.digest, 4)


async def holders(swarm: World, twin: str, adapters: Mapping[AnnouncedAdapter, Adapter]) -> None:
    for index, span in enumerate(SPANS):
        await swarm.start(f"{index}{twin}", span, adapters=adapters)


async def steps(router: Router, adapter: Adapter, rng: random.Random, count: int = 4) -> None:
    """A session of a client without the adapter, whose every step is right to the bit."""
    async with router.open_session(64, Codec.RAW) as session:
        given = b""
        for _ in range(count):
            hidden = exact_input(rng, rng.choice([1, 1, 5]))
            given += hidden
            output = bytes(await session.step(hidden))
            assert output == exact_output(given, ALL_BLOCKS, adapter.parts)[len(given) - len(hidden) :]
            await trio.sleep(rng.choice([0, 1]))


async def frozen_there_and_back(client: SwarmPasses, seed: int, adapter: Adapter) -> None:
    """Passes of a client without the adapter: gradients come back for what went in alone."""
    hidden, gradient = drawn(seed, sum(LENGTHS)), drawn(~seed, sum(LENGTHS))
    output, crossed = await client.outputs(ALL_BLOCKS, LENGTHS, hidden)
    assert output == b"".join(exact_output(each, ALL_BLOCKS, adapter.parts) for each in by_sequence(hidden, LENGTHS))
    found = await client.all_gradients(crossed, gradient)
    coming = by_sequence(gradient, LENGTHS)
    assert found.hidden == b"".join(exact_gradient(each, ALL_BLOCKS, adapter.parts) for each in coming)
    assert found.adapter.tolist() == np.zeros(0).tolist()


@simulated
async def test_sessions_and_passes_have_the_adapter_that_is_named_and_no_part_crosses_the_wire() -> None:
    rng = random.Random(1)
    one, sparse = drawn_adapter(rng), drawn_adapter(rng, [1, 4])
    async with world() as swarm:
        await holders(swarm, "a", {named("pirate", one): one, named("sparse", sparse): sparse})
        await holders(swarm, "b", {})
        async with swarm.client() as (router, _):
            parts = parts_sent_by(router)
            for wanted, adapter in (("pirate", one), (sparse.digest.hex().upper(), sparse), ("sparse", sparse)):
                found = await with_served_adapter(router, wanted)
                for seed in range(3):
                    await steps(found, adapter, rng)
                    assert {str(hop.peer) for hop in found.route} == {f"peer-{index}a" for index in range(3)}
                    await frozen_there_and_back(SwarmPasses(found.finder, Codec.RAW), seed, adapter)
            assert not parts
            await there_and_back(SwarmPasses(router.finder, Codec.RAW), 2, LENGTHS, None)


@simulated
async def test_an_adapter_that_nobody_has_used_for_long_is_still_held() -> None:
    adapter = drawn_adapter(random.Random(8))
    async with world() as swarm:
        await holders(swarm, "a", {named("pirate", adapter): adapter})
        await trio.sleep(2 * GENEROUS.adapter_idle_s)
        async with swarm.client() as (router, _):
            await steps(await with_served_adapter(router, "pirate"), adapter, random.Random(8))


@simulated
async def test_a_client_that_has_the_adapter_sends_it_only_to_servers_that_do_not_hold_it() -> None:
    adapter = drawn_adapter(random.Random(2))
    async with world() as swarm:
        await holders(swarm, "a", {named("pirate", adapter): adapter})
        async with swarm.client() as (router, _):
            parts = parts_sent_by(router)
            await there_and_back(SwarmPasses(router.finder, Codec.RAW), 2, LENGTHS, adapter)
            assert not parts
        await swarm.stop("1a")
        await swarm.start("1b", SPANS[1])
        async with swarm.client(name="other") as (router, _):
            parts = parts_sent_by(router)
            await there_and_back(SwarmPasses(router.finder, Codec.RAW), 2, LENGTHS, adapter)
            assert {peer for peer, _ in parts} == {"peer-1b"}


@simulated
async def test_a_name_that_nobody_announces_or_that_stands_for_two_is_refused() -> None:
    rng = random.Random(3)
    one, other = drawn_adapter(rng), drawn_adapter(rng)
    async with world() as swarm:
        await holders(swarm, "a", {named("pirate", one): one})
        await holders(swarm, "b", {named("pirate", other): other, named("butler", other): other})
        async with swarm.client() as (router, _):
            with pytest.raises(ConfigError, match="2 adapters named 'pirate'") as refused:
                await with_served_adapter(router, "pirate")
            assert one.digest.hex() in str(refused.value)
            await steps(await with_served_adapter(router, one.digest.hex()), one, rng)
            with pytest.raises(ConfigError, match="there are butler, pirate"):
                await with_served_adapter(router, "cook")
            found = await with_served_adapter(router, "butler")
            with pytest.raises(ConfigError, match="one adapter"):
                await SwarmPasses(found.finder, Codec.RAW).outputs(ALL_BLOCKS, [1], drawn(1, 1), one)
            with pytest.raises(ConfigError, match="one adapter"):
                async with found.open_session(8, Codec.RAW, adapter=one):
                    pass


@simulated
async def test_a_server_that_announces_an_adapter_that_it_does_not_hold_is_passed_over() -> None:
    adapter, other = (drawn_adapter(random.Random(seed)) for seed in (4, 5))
    async with world() as swarm:
        await holders(swarm, "a", {named("pirate", adapter): adapter})
        await swarm.start("1c", SPANS[1], adapters={named("pirate", adapter): other}, said_us=1)
        async with swarm.client() as (router, _):
            found = await with_served_adapter(router, "pirate")
            own = found.finder
            found.finder = watched = WatchedFinder(own.model, own.pool, own.swarm, own.policy, own.rng, own.run)
            client = SwarmPasses(watched, Codec.RAW)
            for seed in range(4):
                await steps(found, adapter, random.Random(seed))
                for other_seed in range(4):
                    await frozen_there_and_back(client, other_seed, adapter)
            assert 1 <= len(watched.failures) <= 4, "it is not asked first in each pass"
            assert {peer for _, peer, _ in watched.failures} == {peer_named("1c")}
            await there_and_back(SwarmPasses(router.finder, Codec.RAW), 2, LENGTHS, adapter)
            assert not router.finder.records.bans.is_banned(peer_named("1c"), trio.current_time()), (
                "that client brings it"
            )


@simulated
async def test_an_adapter_that_is_not_held_for_all_blocks_is_explained() -> None:
    adapter = drawn_adapter(random.Random(6))
    async with world() as swarm:
        await holders(swarm, "b", {})
        await swarm.start("0a", SPANS[0], adapters={named("pirate", adapter): adapter})
        async with swarm.client() as (router, _):
            with pytest.raises((NoRoute, PeerError), match="do not announce the adapter"):
                await with_served_adapter(router, "pirate")


@pytest.mark.parametrize("seed", seeds(10))
@simulated
async def test_holders_may_come_and_go_and_others_never_take_their_place(seed: int) -> None:
    rng = random.Random(seed)
    adapter = drawn_adapter(rng)
    own = {named("pirate", adapter): adapter}
    async with world(seed) as swarm:
        for twin in "abc":
            await holders(swarm, twin, own if twin != "c" else {})
        async with swarm.client() as (router, _):
            found = await with_served_adapter(router, "pirate")
            async with found.open_session(64, Codec.RAW) as session:
                given = b""
                for turn in range(6):
                    hidden = exact_input(rng, 2)
                    given += hidden
                    output = bytes(await session.step(hidden))
                    assert output == exact_output(given, ALL_BLOCKS, adapter.parts)[-len(hidden) :]
                    if turn in (1, 3):
                        victim = f"{rng.randrange(3)}{rng.choice('ab')}"
                        if victim in swarm.nodes:
                            swarm.kill(victim)
                            await swarm.start(victim, SPANS[int(victim[0])], adapters=own)
                    await frozen_there_and_back(SwarmPasses(found.finder, Codec.RAW), turn, adapter)
            for index in range(3):
                for twin in "ab":
                    swarm.kill(f"{index}{twin}")
            with pytest.raises((NoRoute, PeerError, SessionLost)):
                await steps(found, adapter, rng)


@simulated
async def test_a_node_that_moves_or_loses_its_worker_holds_its_adapters_again() -> None:
    adapter = drawn_adapter(random.Random(7))
    async with world() as swarm:
        await swarm.start("0", Span(0, 3), adapters={named("pirate", adapter): adapter})
        await swarm.start("1", Span(3, MODEL.blocks), adapters={named("pirate", adapter): adapter})
        async with swarm.client() as (router, _):
            found = await with_served_adapter(router, "pirate")
            await steps(found, adapter, random.Random(1))
            for name, span in (("0", Span(3, MODEL.blocks)), ("1", Span(0, 3))):
                await swarm.nodes[name].role.change_span(span, 0)
            await trio.sleep(10)  # the client hears of it
            await steps(found, adapter, random.Random(2))
            held = swarm.nodes["0"].worker.executor.adapters[adapter.digest]
            assert sorted(held) == list(range(3, MODEL.blocks))
