"""The limits of recoveries: their time, the peers that may end a session, and the places of its hops."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, RecoveryPolicy, StandingPolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute
from llmnode.testing import exact_input, exact_output
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.world import ALL_BLOCKS, ROW, SPANS, Dialogue, kv_is_free, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.session.session import InferenceSession
    from llmnode.testing import World
    from llmnode.wire.frame import Frame

POLICY = ClientPolicy(chunk_tokens=8)
RECOVERY = RecoveryPolicy()
POSITIONS = 60
PATIENT = replace(POLICY, standing=StandingPolicy(first_patience_s=POLICY.step_timeout_s))
"""A client that does not give up a new server before a step may have ended."""
REPLAY_S = POLICY.step_timeout_s + POSITIONS / RECOVERY.replay_positions_per_s
"""The limit of one replay of them."""
TRICKLE_S = 50.0
"""For each chunk: less than a step may take."""


def name_of(peer: PeerId) -> str:
    return str(peer).removeprefix("peer-")


async def begun(session: InferenceSession) -> None:
    await Dialogue(session, random.Random(1), policy=POLICY).step(POSITIONS)


def lose_to(swarm: World, session: InferenceSession, slower_by_s: float) -> None:
    """The second hop is lost, and its twin takes this much longer for each chunk."""
    lost = name_of(session.route[1].peer)
    swarm.nodes[{"1a": "1b", "1b": "1a"}[lost]].worker.slower_by_s = slower_by_s
    swarm.kill(lost)


@simulated
async def test_a_long_replay_is_not_cut_while_it_gets_on() -> None:
    async with pairs_of_servers() as swarm, swarm.session(POLICY) as (session, _):
        await begun(session)
        lose_to(swarm, session, 6.0)
        await session.step(bytes(ROW))
        (recovery,) = session.recoveries
        assert recovery.stall_s > RECOVERY.timeout_s


@simulated
async def test_a_step_that_gets_on_may_lose_a_hop_long_after_another() -> None:
    hidden = exact_input(random.Random(1), 100)
    answers = []
    async with pairs_of_servers() as swarm, swarm.session(POLICY, max_length=120) as (session, _):
        await swarm.start("1c", SPANS[1])
        for twin in "abc":
            swarm.nodes[f"1{twin}"].worker.slower_by_s = 5.0

        async def step() -> None:
            answers.append(bytes(await session.step(hidden)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            for after_s in (1.0, 2 * RECOVERY.timeout_s):
                await trio.sleep(after_s)
                swarm.kill(name_of(session.route[1].peer))
        assert len(session.recoveries) == 2
    assert answers == [exact_output(hidden, ALL_BLOCKS)]


@simulated
async def test_a_server_that_trickles_keeps_a_session_from_others_for_a_limited_time() -> None:
    async with pairs_of_servers() as swarm, swarm.session(PATIENT) as (session, _):
        await begun(session)
        lose_to(swarm, session, TRICKLE_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.step, bytes(ROW))
            await trio.sleep(5)
            await swarm.start("1c", SPANS[1])
        (recovery,) = session.recoveries
        assert [name_of(peer) for peer in recovery.taken_over_by] == ["1c"]
        for_a_push_s = PATIENT.recovery.replay_patience_s  # it may not have come
        assert REPLAY_S <= recovery.stall_s < REPLAY_S + for_a_push_s + 5


@simulated
async def test_many_servers_that_trickle_do_not_hold_a_session_for_ever() -> None:
    async with pairs_of_servers() as swarm, swarm.session(POLICY) as (session, _):
        await begun(session)
        for number in range(2 * RECOVERY.failed_tries):
            (await swarm.start(f"trickles{number}", SPANS[1])).worker.slower_by_s = TRICKLE_S
        await trio.sleep(10)
        lose_to(swarm, session, TRICKLE_S)
        began_s = trio.current_time()
        with pytest.raises(NoRoute):
            await session.step(bytes(ROW))
        assert trio.current_time() - began_s < RECOVERY.timeout_s + (RECOVERY.failed_tries + 1) * REPLAY_S


@simulated
async def test_servers_that_take_over_and_never_compute_do_not_hold_a_session_for_ever() -> None:
    """They answer each replay, and refuse each step."""
    recovery = RecoveryPolicy(replacements=6)
    refused = []

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        if frame.type is not FrameType.RESULT or frame.start < POSITIONS:
            return [frame]
        refused.append(frame)
        return [refusal_of(frame, RefusalCode.BUSY, "because")]

    async with pairs_of_servers() as swarm:
        for twin in "ab":
            swarm.nodes[f"1{twin}"].network.tamper = refuse
        async with swarm.session(ClientPolicy(chunk_tokens=8, recovery=recovery)) as (session, _):
            await begun(session)
            with pytest.raises(NoRoute, match="because"):
                await session.step(bytes(ROW))
            assert len(refused) == recovery.replacements + 1
            for twin in "ab":
                swarm.nodes[f"1{twin}"].network.tamper = None
            await session.step(bytes(ROW))
        await kv_is_free(swarm)


@simulated
async def test_one_peer_does_not_end_a_session_while_the_lost_one_may_come_back() -> None:
    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        return [refusal_of(frame, RefusalCode.CONFLICT, "lies") if frame.type is FrameType.OPENED else frame]

    async with world() as swarm:
        for number, span in enumerate(SPANS):
            await swarm.start(str(number), span)
        await trio.sleep(10)
        async with swarm.session(POLICY) as (session, _):
            await begun(session)
            (await swarm.start("liar", SPANS[1])).network.tamper = refuse
            await trio.sleep(10)
            await swarm.stop("1")  # nobody's view has it any more
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.step, bytes(ROW))
                await trio.sleep(RECOVERY.timeout_s / 2)
                await swarm.start("1", SPANS[1])
            assert [name_of(each.lost) for each in session.recoveries] == ["1"]


@simulated
async def test_a_second_hop_goes_to_a_peer_that_has_one_only_if_nobody_else_holds_its_blocks() -> None:
    halves = [Span(0, 3), Span(3, 6)]
    async with world() as swarm:
        for number, span in enumerate(halves):
            await swarm.start(str(number), span)
        await trio.sleep(10)
        async with swarm.session(max_length=120) as (session, _):
            dialogue = Dialogue(session, random.Random(1))
            whole = (await swarm.start("whole", ALL_BLOCKS)).network.peer
            await trio.sleep(10)
            swarm.kill("0")
            for _ in range(40):  # by then the client knows how fast it is
                await dialogue.step(1)
            other = (await swarm.start("other", halves[1])).network.peer
            await trio.sleep(10)
            swarm.kill("1")
            await dialogue.step(1)
            assert [hop.peer for hop in session.route] == [whole, other]
            swarm.kill("other")
            await dialogue.step(1)
            assert [hop.peer for hop in session.route] == [whole, whole]


@simulated
async def test_a_server_that_hangs_has_to_prove_itself_anew() -> None:
    async with (
        pairs_of_servers() as swarm,
        swarm.client(ClientPolicy()) as (router, _),
        router.open_session(64, Codec.RAW) as session,
    ):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        hangs, standing = session.route[1].peer, router.finder.records.standing
        assert not standing.is_proven(hangs, trio.current_time()), "no decode has shown its speed"
        for _ in range(20):
            await dialogue.step(1)
        assert standing.is_proven(hangs, trio.current_time())
        swarm.node(hangs).worker.gate = trio.Event()
        await dialogue.step(1)
        assert not standing.is_proven(hangs, trio.current_time())
        swarm.node(hangs).worker.open_gate()
