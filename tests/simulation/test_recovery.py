"""Sessions through real serving and client code, on an internet in memory and a mock clock, while peers fail by a plan.

The arithmetic is exact, so every answer is right to the bit or the KV of some peer is not what it should be. A seed
that fails says how it is run again, and what befell it; LLMNODE_SEEDS=5000 tries many.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, PushPolicy, RecoveryPolicy, RoutePolicy, TrustPolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerError, SessionClosed, SessionLost
from llmnode.node.serve.server import ServerLink
from llmnode.testing import (
    Cast,
    Conditions,
    FaultPlan,
    MemoryNetwork,
    Odds,
    check_coverage,
    check_no_banned_peer,
    check_nobody_is_convicted,
    exact_input,
    exact_output,
    seeds,
)
from llmnode.testing.faults import ALL_KINDS, FailForwards, Freeze, Kill, Stop
from llmnode.wire.payload import Codec
from simulation.world import (
    ALL_BLOCKS,
    DELAY_S,
    FORWARD_S,
    KV_TOKENS,
    MODEL,
    ROW,
    SPANS,
    Dialogue,
    World,
    kv_is_free,
    pairs_of_servers,
    simulated,
    world,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from llmnode.session.router import Router
    from llmnode.session.session import InferenceSession

MAX_LENGTH = 120
LONGEST_OUTAGE_S = 12.0
POLICY = ClientPolicy(chunk_tokens=8)
POLICIES = [
    POLICY,
    POLICY,
    replace(POLICY, trust=TrustPolicy(strict=True)),
    replace(POLICY, recovery=RecoveryPolicy(upstream_logs=False)),
    replace(POLICY, push=PushPolicy(enabled=False)),
    replace(POLICY, route=RoutePolicy(standbys=False)),
    replace(POLICY, chunks_ahead=1),
]
OTHER_CUTS = [Span(0, 3), Span(3, 6), Span(1, 5), Span(0, 6)]
CAST = Cast(
    nodes=[f"{index}{twin}" for index in range(3) for twin in "ab"],
    spans=[*SPANS, *OTHER_CUTS],
    movable=["0b", "1b", "2b"],
)
KINDS = [*ALL_KINDS, Kill, Stop, Stop, Freeze, FailForwards, FailForwards]  # most of the others cost no server
WEATHERS = [
    Conditions(delay_s=DELAY_S),
    Conditions(delay_s=DELAY_S, jitter_s=0.2),
    Conditions(delay_s=DELAY_S, jitter_s=0.02, duplication=0.2),
    Conditions(delay_s=DELAY_S, bytes_per_s=20_000),
    Conditions(delay_s=DELAY_S, loss=0.02, duplication=0.02),
]


@asynccontextmanager
async def open_at_last(router: Router) -> AsyncIterator[InferenceSession]:
    """All holders of a span may be away at the moment."""
    async with AsyncExitStack() as stack:
        with trio.fail_after(10 * LONGEST_OUTAGE_S):
            while True:
                try:
                    session = await stack.enter_async_context(router.open_session(MAX_LENGTH, Codec.RAW))
                    break
                except (NoRoute, PeerError):
                    await trio.sleep(1)
        yield session


async def talk(session: InferenceSession, rng: random.Random, policy: ClientPolicy, *, steps: int = 25) -> None:
    dialogue = Dialogue(session, rng, policy=policy)
    for _ in range(steps):
        if rng.random() < 0.15:
            await dialogue.go_back(rng.randrange(session.position + 1))
        await dialogue.step(min(rng.choice([1, 1, 1, 2, 20]), MAX_LENGTH - session.position) or 1)
        if session.position == MAX_LENGTH:
            await dialogue.go_back(MAX_LENGTH // 2)
        await trio.sleep(rng.expovariate(1 / 0.3))


@pytest.mark.parametrize("seed", seeds(500), ids=lambda seed: f"seed-{seed}-")
@simulated
async def test_a_session_outlives_whatever_befalls_its_servers(seed: int) -> None:
    await outlive(seed)


async def outlive(seed: int, trace: Callable[[str], None] | None = None) -> None:
    rng = random.Random(seed)
    policy = rng.choice(POLICIES)
    plan = FaultPlan.draw(seed, CAST, Odds(rng.randrange(1, 5), longest_s=LONGEST_OUTAGE_S, kinds=KINDS))
    async with pairs_of_servers(seed, rng.choice(WEATHERS)) as swarm, swarm.client(policy) as (router, _):
        swarm.internet.trace = trace or swarm.internet.trace
        async with plan.upon(swarm), open_at_last(router) as session:
            await talk(session, rng, policy)
            check_nobody_is_convicted(session)
        check_no_banned_peer(router.finder, policy)
        await kv_is_free(swarm)
        if rng.random() < 0.25:
            swarm.kill(rng.choice(CAST.nodes))
        await check_coverage(swarm)


# One by one


@simulated
async def test_a_server_that_is_back_takes_its_own_place_at_once_if_there_is_nobody_else() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        lost = session.route[1].peer
        name = str(lost).removeprefix("peer-")
        swarm.kill(name)
        await swarm.start(name, SPANS[1])
        swarm.kill({"1a": "1b", "1b": "1a"}[name])
        await dialogue.step(1)
        (recovery,) = session.recoveries
        assert (recovery.lost, recovery.taken_over_by) == (lost, (lost,))
        assert recovery.stall_s < POLICY.route.retry_s / 2


@pytest.mark.parametrize("index", range(3))
@simulated
async def test_a_killed_server_costs_its_replay_and_no_more(index: int) -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(index))
        await dialogue.step(20)
        lost = session.route[index].peer
        swarm.kill(str(lost).removeprefix("peer-"))
        await dialogue.step(1)
        (recovery,) = session.recoveries
        assert (recovery.lost, recovery.span, recovery.positions) == (lost, SPANS[index], 20)
        assert lost not in recovery.taken_over_by
        assert recovery.stall_s < 1.0


@simulated
async def test_a_connection_to_who_takes_over_is_ready() -> None:
    stalls_s = []
    for standbys in (True, False):
        async with world() as swarm:
            await swarm.start("contact", Span(0, 1))
            async with swarm.client(ClientPolicy(route=RoutePolicy(standbys=standbys))) as (router, _):
                for name in ("0a", "0b"):
                    await swarm.start(name, ALL_BLOCKS)
                await trio.sleep(10)
                async with router.open_session(64, Codec.RAW) as session:
                    dialogue = Dialogue(session, random.Random(1))
                    await dialogue.step(20)
                    swarm.kill(str(session.route[0].peer).removeprefix("peer-"))
                    await dialogue.step(1)
                    stalls_s.append(session.recoveries[0].stall_s)
    warm_s, cold_s = stalls_s
    assert cold_s - warm_s > 2 * DELAY_S, "what a dial takes"


@simulated
async def test_a_server_that_hangs_is_given_up_by_what_it_took_before() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        hangs = session.route[1].peer
        swarm.node(hangs).worker.gate = trio.Event()
        began_s = trio.current_time()
        await dialogue.step(1)
        assert [each.lost for each in session.recoveries] == [hangs]
        assert trio.current_time() - began_s < 20
        swarm.node(hangs).worker.gate.set()
    await kv_is_free(swarm)


@simulated
async def test_a_silent_server_is_given_up_in_seven_seconds() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, client):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        swarm.internet.cut(client, session.route[1].peer)
        began = trio.current_time()
        await dialogue.step(1)
        assert trio.current_time() - began < 7.0
        assert len(session.recoveries) == 1


@simulated
async def test_a_server_that_has_just_come_back_is_not_kept_waiting_if_it_is_all_there_is() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        for _ in range(8):  # both are banned, and which of them is asked first is chance
            lost = str(session.route[1].peer).removeprefix("peer-")
            swarm.kill(lost)
            await dialogue.step(1)
            await swarm.start(lost, SPANS[1])
        assert len(session.recoveries) == 8
        assert all(recovery.stall_s < 1.0 for recovery in session.recoveries)


@simulated
async def test_a_frozen_server_that_nobody_was_using_does_not_hold_up_a_recovery() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, client):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        lost = session.route[1].peer
        twin = "1a" if lost == "peer-1b" else "1b"
        await swarm.start("third", SPANS[1])
        await trio.sleep(10)
        swarm.internet.cut(client, swarm.nodes[twin].network.peer)
        await trio.sleep(1)
        swarm.kill(str(lost).removeprefix("peer-"))
        await dialogue.step(1)
        assert [each.taken_over_by for each in session.recoveries] == [("peer-third",)]
        assert session.recoveries[0].stall_s < 7.0


@simulated
async def test_several_servers_take_the_place_of_one() -> None:
    async with world() as swarm:
        whole = await swarm.start("whole", ALL_BLOCKS)
        for index, span in enumerate(SPANS):
            await swarm.start(f"part{index}", span)
        await trio.sleep(10)
        async with swarm.client() as (router, _), router.open_session(64, Codec.RAW) as session:
            assert [hop.peer for hop in session.route] == [whole.network.peer], "the fewest hops"
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(20)
            swarm.kill("whole")
            await dialogue.step(3)
            assert [hop.span for hop in session.route] == SPANS
            await dialogue.go_back(10)
            await dialogue.step(1)


@simulated
async def test_who_refuses_is_passed_over_though_the_hop_before_may_push_to_it_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = []
    check = ServerLink._check_room

    def noted(link: ServerLink) -> None:
        refusals.extend([link] * link._server.is_draining)
        check(link)

    monkeypatch.setattr(ServerLink, "_check_room", noted)
    for seed in range(6):  # which of the two is asked first is chance
        async with world(seed) as swarm:
            await swarm.start("before", SPANS[0])
            await swarm.start("lost", Span(2, 6))
            async with swarm.client() as (router, _), router.open_session(64, Codec.RAW) as session:
                dialogue = Dialogue(session, random.Random(seed))
                await dialogue.step(20)
                for name in ("busy", "third"):
                    await swarm.start(name, Span(2, 6))
                await trio.sleep(10)
                swarm.nodes["busy"].server.is_draining = True  # which it has told nobody
                swarm.kill("lost")
                await dialogue.step(3)
                (recovery,) = session.recoveries
                assert recovery.taken_over_by == (swarm.nodes["third"].network.peer,)
                began_s = trio.current_time()
                await dialogue.step(1)
                assert session.timings[1].direct
                assert trio.current_time() - began_s == pytest.approx(2 * FORWARD_S + 3 * DELAY_S, abs=0.001)
    assert 0 < len(refusals) < 6


@pytest.mark.parametrize("first", [0, 2], ids=["by us", "by the hop before"])
@simulated
async def test_who_take_the_place_of_one_compute_different_chunks_of_the_replay_at_the_same_time(first: int) -> None:
    chunks, parts = 6, [Span(first, 4), Span(4, 6)]
    policy = ClientPolicy(chunk_tokens=4, chunks_ahead=chunks)
    async with world() as swarm:
        if first:
            await swarm.start("before", Span(0, first))
        await swarm.start("lost", Span(first, 6))
        for index, span in enumerate(parts):
            await swarm.start(f"part{index}", span)
        await trio.sleep(10)
        async with swarm.client(policy) as (router, _), router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1), policy=policy)
            await dialogue.step(4 * chunks)
            for index in range(len(parts)):
                swarm.nodes[f"part{index}"].worker.forward_s = 1.0
            swarm.kill("lost")
            await dialogue.step(1)
            assert [hop.span for hop in session.route[-2:]] == parts
            (recovery,) = session.recoveries
    assert recovery.stall_s == pytest.approx(chunks + len(parts) - 1, abs=0.5)


@simulated
async def test_a_client_cut_off_from_everybody_goes_on_when_its_network_is_back() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, client):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        peers = [node.network.peer for node in swarm.nodes.values()]
        for peer in peers:
            swarm.internet.cut(client, peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialogue.step, 1)
            await trio.sleep(15)
            for peer in peers:
                swarm.internet.mend(client, peer)


@simulated
async def test_when_nobody_holds_its_blocks_a_session_says_which_and_goes_on_once_somebody_does() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        for twin in "ab":
            swarm.kill(f"1{twin}")
        with pytest.raises(NoRoute) as raised:
            await session.step(bytes(ROW))
        assert raised.value.missing == (SPANS[1],)
        await swarm.start("late", SPANS[1])
        await trio.sleep(10)
        await dialogue.step(2)
        assert session.position == 22


@simulated
async def test_a_step_that_no_peer_can_compute_ends_the_session_with_all_causes() -> None:
    async with pairs_of_servers() as swarm:
        for twin in "ab":
            swarm.nodes[f"1{twin}"].worker.executor.fails = 1000
        async with swarm.session() as (session, _):
            with pytest.raises(SessionLost) as raised:
                await session.step(bytes(ROW))
            assert {cause.peer for cause in raised.value.causes} == {"peer-1a", "peer-1b"}
        await kv_is_free(swarm)


@simulated
async def test_a_server_takes_its_own_place_though_it_has_no_room_for_two() -> None:
    async with world() as swarm:
        node = await swarm.start("only", ALL_BLOCKS)
        await trio.sleep(10)
        async with swarm.client() as (router, _), router.open_session(MAX_LENGTH, Codec.RAW) as session:
            node.worker.executor.occupy(KV_TOKENS - MAX_LENGTH)
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(20)
            node.worker.executor.fails = 1
            await dialogue.step(1)
            assert len(session.recoveries) == 1


@simulated
async def test_a_peer_that_has_come_back_with_another_model_is_passed_over() -> None:
    async with world() as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        await trio.sleep(10)
        async with swarm.client() as (router, _), router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(20)
            await swarm.start("other", ALL_BLOCKS, replace(MODEL, digest=b"o" * 32))
            for index, span in enumerate(SPANS):
                await swarm.start(f"part{index}", span)
            await trio.sleep(10)
            swarm.kill("whole")
            await dialogue.step(1)
            assert [hop.span for hop in session.route] == SPANS


@simulated
async def test_who_announces_nonsense_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = MemoryNetwork.addresses.fget
    assert honest is not None

    def addresses(network: MemoryNetwork) -> list[str]:
        return [f"/nonsense/p2p/{network.peer}"] if network.peer == "peer-liar" else honest(network)

    monkeypatch.setattr(MemoryNetwork, "addresses", property(addresses))
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        await swarm.start("liar", ALL_BLOCKS)
        await trio.sleep(10)
        async with router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(20)
            swarm.kill(str(session.route[1].peer).removeprefix("peer-"))
            await dialogue.step(1)


@simulated
async def test_the_caller_may_reuse_its_buffer() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        hidden = bytearray(exact_input(random.Random(1), 20))
        said = bytes(hidden)
        await session.step(hidden)
        hidden[:] = bytes(len(hidden))
        swarm.kill(str(session.route[0].peer).removeprefix("peer-"))
        answer = await session.step(bytes(ROW))
        assert bytes(answer) == exact_output(said + bytes(ROW), ALL_BLOCKS)[-ROW:]


@asynccontextmanager
async def recovering_session() -> AsyncIterator[tuple[World, InferenceSession]]:
    """A session that has lost its only peer and is about to open two hops instead."""
    async with world() as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        for half in (Span(0, 3), Span(3, 6)):
            await swarm.start(f"from{half.start}", half)
        await trio.sleep(10)
        async with swarm.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(20)
            swarm.kill("whole")
            yield swarm, session
        await kv_is_free(swarm)


DURING_RECOVERY_S = [0.01 * n for n in range(1, 25)]
"""Moments after the loss; all is over in a quarter of a second."""


@pytest.mark.parametrize("after_s", DURING_RECOVERY_S)
@simulated
async def test_a_step_that_is_cancelled_during_recovery_ends_its_session(after_s: float) -> None:
    async with recovering_session() as (_, session):
        with trio.move_on_after(after_s) as patience:
            await session.step(bytes(ROW))
        if patience.cancelled_caught:
            with pytest.raises(SessionClosed):
                await session.step(bytes(ROW))


@pytest.mark.parametrize("after_s", DURING_RECOVERY_S)
@simulated
async def test_a_session_that_is_closed_during_recovery_leaves_no_kv(after_s: float) -> None:
    async with recovering_session() as (swarm, session):

        async def step() -> None:
            with suppress(SessionClosed):
                await session.step(bytes(ROW))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            await trio.sleep(after_s)
            await session.close()
        await kv_is_free(swarm)
