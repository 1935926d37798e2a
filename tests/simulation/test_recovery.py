"""Sessions through real serving and client code, on an internet in memory and a mock clock: peers fail one by one.

The arithmetic is exact, so every answer is right to the bit or the KV of some peer is not what it should be.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import trio

from llmnode.core.peers.absence import TOLD_AGAIN_S
from llmnode.core.policy import ClientPolicy, RoutePolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute, SessionLost
from llmnode.node.serve.server_link import ServerLink
from llmnode.testing import MemoryNetwork, exact_input, exact_output
from llmnode.wire.payload import Codec
from simulation.chaos import MAX_LENGTH, POLICY
from simulation.world import (
    ALL_BLOCKS,
    DELAY_S,
    FORWARD_S,
    KV_TOKENS,
    MODEL,
    ROW,
    SPANS,
    Dialogue,
    kv_is_free,
    pairs_of_servers,
    simulated,
    world,
)


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
            route = RoutePolicy(standbys=standbys, measured_peers=8 * standbys)  # to measure is to connect
            async with swarm.client(ClientPolicy(route=route)) as (router, _):
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
async def test_standbys_of_a_route_are_looked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with short texts would look for them among thousands of servers, many times a second."""
    async with (
        pairs_of_servers() as swarm,
        swarm.client() as (router, _),
        router.open_session(64, Codec.RAW) as session,
    ):
        warmed: list[object] = []
        monkeypatch.setattr(router.finder.pool, "warm", warmed.append)
        for wait_s, others in ((0.0, 0), (RoutePolicy().standbys_again_s, len(SPANS)), (0.0, 0)):
            await trio.sleep(wait_s)
            warmed.clear()
            router.finder.warm_standbys(session.route)
            assert len(warmed) == others


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
    check = ServerLink._check_limits

    def noted(link: ServerLink) -> None:
        refusals.extend([link] * link._server.is_draining)
        check(link)

    monkeypatch.setattr(ServerLink, "_check_limits", noted)
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
async def test_when_nobody_holds_its_blocks_a_session_says_which_and_goes_on_once_somebody_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        for twin in "ab":
            swarm.kill(f"1{twin}")
        with pytest.raises(NoRoute) as raised, caplog.at_level(logging.WARNING, "llmnode"):
            await session.step(bytes(ROW))
        assert raised.value.missing == (SPANS[1],)
        told = [each.getMessage() for each in caplog.records if "trying again for" in each.getMessage()]
        reasons = {text.rpartition("; ")[0] for text in told}
        assert 1 <= len(told) <= len(reasons) * POLICY.recovery.timeout_s / TOLD_AGAIN_S, told
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
async def test_a_server_takes_its_own_place_though_it_has_no_kv_for_two() -> None:
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
