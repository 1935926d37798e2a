"""Adapters of clients at servers: passes and sessions with them are right to the bit, and nobody gets another's."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.budget import Resource
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.core.policy import BudgetPolicy, ClientPolicy, LinkPolicy, RecoveryPolicy
from llmnode.core.serving.adapter_shelf import ENTRY_BYTES
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerError, PeerRefused, SessionLost
from llmnode.session.passes import SwarmPasses
from llmnode.testing import Cast, Conditions, FaultPlan, Odds, exact_output, open_world, seeds
from llmnode.testing.exact_blocks import exact_input, exact_prompts
from llmnode.testing.faults import FailForwards, Freeze, Kill, Restart, Stop
from llmnode.testing.network import peer_named
from llmnode.wire.adapter_messages import AdapterPart
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import unpack
from llmnode.wire.payload import Codec
from simulation.adapters import BRIEF, drawn_adapter, nothing_is_left, parts_held, there_and_back
from simulation.passes import watch_passes
from simulation.world import ALL_BLOCKS, DELAY_S, MODEL, SPANS, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.session.router import Router
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.frame import Frame


LENGTHS = [5, 1, 30, 2, 12]
LONGEST_OUTAGE_S = 12.0
KINDS = [Kill, Restart, Stop, Freeze, FailForwards, FailForwards]
CAST = Cast(
    nodes=[f"{index}{twin}" for index in range(3) for twin in "ab"],
    spans=[*SPANS, Span(0, 3), Span(3, 6), Span(1, 5), Span(0, 6)],
    movable=["0b", "1b", "2b"],
)


def parts_sent_by(router: Router) -> Counter[tuple[PeerId, int]]:
    """Counts the parts that the client sends from now on, by peer and block."""
    sent: Counter[tuple[PeerId, int]] = Counter()

    def note(peer: PeerId, frame: Frame) -> list[Frame]:
        if frame.type is FrameType.PART:
            sent[peer, unpack(AdapterPart, frame.meta).block] += 1
        return [frame]

    router.finder.pool.network.tamper = note  # type: ignore[attr-defined]
    return sent


async def steps(router: Router, adapter: Adapter | None, rng: random.Random, count: int = 4) -> None:
    """A session with `adapter`, and perhaps with deep prompts, whose every step is right to the bit."""
    parts = {} if adapter is None else adapter.parts
    own_rng = random.Random(0 if adapter is None else adapter.digest)
    prompts = own_rng.choice((NO_PROMPTS, DeepPrompts(MODEL.blocks, 1, 3, exact_input(own_rng, 3 * MODEL.blocks))))
    async with router.open_session(64, Codec.RAW, adapter=adapter, prompts=prompts) as session:
        given = b""
        for _ in range(count):
            hidden = exact_input(rng, rng.choice([1, 1, 5]))
            output = bytes(await session.step(hidden))
            given += hidden
            own = [each[: len(given)] for each in exact_prompts(prompts, 1)[0]]
            assert output == exact_output(given, ALL_BLOCKS, parts, own)[len(given) - len(hidden) :]
            await trio.sleep(rng.choice([0, 0.1, 1]))


async def steps_at_last(router: Router, adapter: Adapter | None, rng: random.Random, count: int) -> None:
    """The same, tried again while servers fail."""
    while True:
        try:
            await steps(router, adapter, rng, count)
            break
        except (NoRoute, PeerError):  # nobody holds some blocks, and a session is not opened
            await trio.sleep(1)


@simulated
async def test_passes_and_sessions_have_the_adapter_that_their_client_names() -> None:
    rng = random.Random(1)
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        everywhere, sparse = drawn_adapter(rng), drawn_adapter(rng, [1, 4])
        for seed, adapter in enumerate((everywhere, sparse, None, everywhere)):
            await there_and_back(client, seed, LENGTHS, adapter)
            await there_and_back(client, seed, LENGTHS, adapter, Span(1, 5))
            await there_and_back(client, seed, LENGTHS, adapter, Span(2, 4))
            await steps(router, adapter, rng)


@simulated
async def test_a_server_gets_the_parts_of_its_blocks_alone_and_each_once() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        parts = parts_sent_by(router)
        adapter = drawn_adapter(random.Random(2))
        client = SwarmPasses(router.finder, Codec.RAW)
        for seed in range(6):
            await there_and_back(client, seed, LENGTHS, adapter)
        assert set(parts.values()) == {1}
        for node in swarm.nodes.values():
            sent = {block for peer, block in parts if peer == node.peer}
            held = node.worker.executor.adapters.get(adapter.digest, {})
            assert held == {block: adapter.parts[block] for block in sent}
            assert sent in (set(), set(range(node.worker.span.start, node.worker.span.end)))


@simulated
async def test_a_new_adapter_costs_two_round_trips_on_a_route_of_three_servers() -> None:
    delay_s = 0.3
    async with world(conditions=Conditions(delay_s=delay_s)) as swarm:
        for index, span in enumerate(SPANS):
            await swarm.start(f"server{index}", span)
        async with swarm.client() as (router, _):
            client, rng = SwarmPasses(router.finder, Codec.RAW), random.Random(9)

            async def time_with(adapter: Adapter) -> float:
                since_s = trio.current_time()
                await client.outputs(ALL_BLOCKS, [5], exact_input(rng, 5), adapter)
                return trio.current_time() - since_s

            await time_with(drawn_adapter(rng))
            new = drawn_adapter(rng)
            first_s = await time_with(new)
            assert first_s - await time_with(new) == pytest.approx(2 * 2 * delay_s, rel=0.2)


@simulated
async def test_an_adapter_that_nothing_uses_is_dropped_and_brought_again_when_it_is_wanted() -> None:
    async with open_world(serve_policy=BRIEF) as swarm:
        for index, span in enumerate(SPANS):
            await swarm.start(f"server{index}", span)
        async with swarm.client() as (router, _):
            parts = parts_sent_by(router)
            client, adapter = SwarmPasses(router.finder, Codec.RAW), drawn_adapter(random.Random(3))
            await there_and_back(client, 1, LENGTHS, adapter)
            async with router.open_session(64, Codec.RAW, adapter=adapter) as session:
                await trio.sleep(2 * BRIEF.adapter_idle_s)
                assert parts_held(swarm) == MODEL.blocks  # those of the session
                hidden = exact_input(random.Random(1), 3)
                assert bytes(await session.step(hidden)) == exact_output(hidden, ALL_BLOCKS, adapter.parts)
            await trio.sleep(2 * BRIEF.adapter_idle_s)
            assert parts_held(swarm) == 0
            nothing_is_left(swarm)
            before = parts.total()
            await there_and_back(client, 2, LENGTHS, adapter)
            assert parts.total() > before
            await trio.sleep(2 * BRIEF.adapter_idle_s)
            nothing_is_left(swarm)
            await steps(router, adapter, random.Random(4))


@pytest.mark.parametrize("seed", seeds(40))
@simulated
async def test_they_are_right_to_the_bit_whatever_fails(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, is_repeatable, computed = random.Random(seed), seed % 3 == 0, watch_passes(monkeypatch)
    plan = FaultPlan.draw(seed, CAST, Odds(rng.randrange(1, 5), longest_s=LONGEST_OUTAGE_S, kinds=KINDS))
    recovery = RecoveryPolicy(timeout_s=10 * LONGEST_OUTAGE_S)
    policy = ClientPolicy(recovery=recovery, deterministic=is_repeatable)
    async with pairs_of_servers(seed) as swarm, swarm.client(policy) as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        async with plan.upon(swarm):
            for step in range(6):
                adapter = drawn_adapter(rng, sorted(rng.sample(range(MODEL.blocks), rng.randint(1, MODEL.blocks))))
                lengths = rng.choices([1, 3, 20], k=rng.randint(1, 6))
                await there_and_back(client, 100 * seed + step, lengths, adapter)
                await steps_at_last(router, adapter, rng, 2)
    assert not is_repeatable or {len(together) for together in computed} == {1}


@pytest.mark.parametrize("seed", seeds(3, long_run=8))
@simulated
async def test_eight_clients_with_adapters_of_their_own_get_what_each_gets_alone(seed: int) -> None:
    """Adapters come, change and go all the time, in a memory that holds a few of them, and servers fail."""
    budget = BudgetPolicy(adapter_bytes=8 * (ENTRY_BYTES + 2048), group_share=0.5, peer_share=0.5)
    odds = Odds(seed % 3, longest_s=LONGEST_OUTAGE_S, kinds=KINDS)  # for one seed of three nothing fails
    plan = FaultPlan.draw(seed, Cast(["a", "b", "c"]), odds)
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=10 * LONGEST_OUTAGE_S)) if plan.faults else ClientPolicy()
    own_steps = steps_at_last if plan.faults else steps
    async with open_world(
        seed, conditions=Conditions(delay_s=DELAY_S), link_policy=LinkPolicy(budget=budget), serve_policy=BRIEF
    ) as swarm:
        for name, span in (("a", Span(0, 3)), ("b", Span(3, 6)), ("c", Span(0, 6))):
            await swarm.start(name, span)
        await trio.sleep(5)
        most = 0

        async def live(number: int) -> None:
            nonlocal most
            rng = random.Random(8 * seed + number)
            async with swarm.client(policy, name=f"client {number}") as (router, _):
                client = SwarmPasses(router.finder, Codec.RAW)
                for step in range(8):
                    adapter = drawn_adapter(rng, values=60) if step % 2 == 0 or rng.random() < 0.5 else None
                    await there_and_back(client, 1000 * seed + 100 * number + step, [3, 8], adapter)
                    await own_steps(router, adapter, rng, 2)
                    for node in swarm.nodes.values():
                        held_bytes = sum(
                            len(part) for parts in node.worker.executor.adapters.values() for part in parts.values()
                        )
                        most = max(most, held_bytes)

        async with plan.upon(swarm), trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(live, number)
        assert 0 < most <= budget.adapter_bytes
        await trio.sleep(2 * BRIEF.adapter_idle_s)
        nothing_is_left(swarm)


@simulated
async def test_servers_that_know_no_adapters_are_passed_over() -> None:
    async with pairs_of_servers() as swarm:
        swarm.internet.old = {peer_named(f"{index}a") for index in range(3)}
        async with swarm.client() as (router, _):
            client, rng = SwarmPasses(router.finder, Codec.RAW), random.Random(4)
            for seed in range(4):
                adapter = drawn_adapter(rng)
                await there_and_back(client, seed, LENGTHS, adapter)
                await steps(router, adapter, rng)
            assert not any(swarm.nodes[f"{index}a"].worker.executor.adapters for index in range(3))


@simulated
async def test_with_such_servers_alone_the_client_is_told_in_time() -> None:
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=5.0))
    async with world() as swarm:
        await swarm.start("old", ALL_BLOCKS)
        swarm.internet.old = {peer_named("old")}
        async with swarm.client(policy) as (router, _):
            adapter = drawn_adapter(random.Random(5))
            with pytest.raises((SessionLost, NoRoute)):
                await SwarmPasses(router.finder, Codec.RAW).outputs(
                    ALL_BLOCKS, [1], exact_input(random.Random(1), 1), adapter
                )
            with pytest.raises(PeerRefused, match="protocol 1"):
                async with router.open_session(8, Codec.RAW, adapter=adapter):
                    pass


@simulated
async def test_a_worker_that_is_lost_takes_all_adapters_along() -> None:
    async with world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            client, adapter = SwarmPasses(router.finder, Codec.RAW), drawn_adapter(random.Random(8))
            await there_and_back(client, 1, LENGTHS, adapter)
            node.source.lose()
            await trio.sleep(5)
            assert not node.network.budget.process.held[Resource.ADAPTERS]
            await there_and_back(client, 2, LENGTHS, adapter)
            await steps(router, adapter, random.Random(1))
