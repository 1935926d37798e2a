"""Sessions get KV as they use it. One that finds none to grow has others leave, or leaves and comes back by a replay.

No session fails for want of KV, and none waits for ever. The arithmetic is exact, as in `test_chaos.py`.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.policy import AdmissionPolicy, RecoveryPolicy, RoutePolicy
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.errors import PeerRefused
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import Conditions, check_kv_is_free, open_world, seeds, simulate
from llmnode.testing.world import GENEROUS
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import ForkRequest, OpenRequest, RefusalCode, pack
from llmnode.wire.payload import Codec
from simulation.scarce import PATIENT
from simulation.test_noticing import HALVES
from simulation.world import ALL_BLOCKS, DELAY_S, KV_TOKENS, MODEL, ROW, Dialogue, simulated

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.serving.kv_shares import KvLease
    from llmnode.core.span import Span
    from llmnode.testing import World
    from llmnode.testing.world import SimulatedClient

PIECE = 8
GROWING = replace(GENEROUS, admission=AdmissionPolicy(first_positions=PIECE))
WAITING = replace(PATIENT, recovery=RecoveryPolicy(timeout_s=600))
"""The time that a step may take, for want of KV."""
LONG_S = 1200.0
"""All sessions end within this time."""
PLACES: dict[str, list[Span]] = {"one": [ALL_BLOCKS], "two": [ALL_BLOCKS, ALL_BLOCKS], "a route of two": list(HALVES)}
HALF = KV_TOKENS // 2


def scarce(seed: int = 0) -> AbstractAsyncContextManager[World]:
    return open_world(seed, conditions=Conditions(delay_s=DELAY_S), serve_policy=GROWING)


@simulated
async def test_sessions_hold_what_they_use_and_a_piece_so_that_more_are_open_than_could_all_be_full() -> None:
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        client = await stack.enter_async_context(swarm.client(PATIENT))
        dialogues: list[Dialogue] = []
        for number in range(8):
            session = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW))
            assert node.worker.kv_tokens_free == KV_TOKENS - 24 * number - PIECE
            dialogues.append(Dialogue(session, random.Random(number)))
            await dialogues[-1].step(20)
            await dialogues[-1].step(1)
            await dialogues[-1].go_back(10)
            assert node.worker.kv_tokens_free == KV_TOKENS - 24 * (number + 1)
        copy = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW))
        await dialogues[0].session.fork([copy])
        assert node.worker.reserved == 8 * 24 + 16
        assert not any(each.session.recoveries for each in dialogues)
        for each in dialogues:
            await each.session.close()
        await copy.close()
        await check_kv_is_free(swarm)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", seeds(3))
def test_sessions_that_use_more_than_there_is_all_end(seed: int, place: str) -> None:
    simulate(partial(outgrow, seed, place), seed=seed)


async def outgrow(seed: int, place: str) -> None:
    """Eight clients want 1600 positions in the end, with pauses now and then, and a server has 400."""
    rng, done = random.Random(seed), list[int]()
    async with scarce(seed) as swarm, AsyncExitStack() as stack:
        for number, span in enumerate(PLACES[place]):
            await swarm.start(f"{number}", span)
        await trio.sleep(1)

        async def use(client: SimulatedClient, number: int) -> None:
            await trio.sleep(rng.uniform(0, 3))
            async with client.router.open_session(HALF, Codec.RAW) as session:
                dialogue = Dialogue(session, random.Random(number), policy=WAITING)
                while session.position < HALF:
                    await dialogue.step(min(rng.randint(1, 40), HALF - session.position))
                    await trio.sleep(rng.choice((0, 0.5, 2, 8)))
                done.append(number)

        clients = [await stack.enter_async_context(swarm.client(PATIENT, name=f"c{each}")) for each in range(8)]
        with trio.fail_after(LONG_S):
            async with trio.open_nursery() as nursery:
                for number, client in enumerate(clients):
                    nursery.start_soon(use, client, number)
        assert sorted(done) == list(range(8))
        assert not any(client.router.finder.banned for client in clients)
        await check_kv_is_free(swarm)


@simulated
async def test_a_client_that_opens_many_long_sessions_holds_no_more_than_it_uses() -> None:
    """Another client comes in at once, and gets its half whatever the first one does then."""
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        hog, honest = [await stack.enter_async_context(swarm.client(PATIENT, name=each)) for each in ("hog", "honest")]
        dialogues: list[Dialogue] = []
        for number in range(12):
            session = await stack.enter_async_context(hog.router.open_session(HALF, Codec.RAW))
            dialogues.append(Dialogue(session, random.Random(number), policy=WAITING))
            await dialogues[-1].step(1)
        assert node.worker.reserved == 12 * PIECE
        async with trio.open_nursery() as nursery:
            for each in dialogues:
                nursery.start_soon(use_up, each)
            with trio.fail_after(1):
                own = await stack.enter_async_context(honest.router.open_session(HALF, Codec.RAW))
            dialogue = Dialogue(own, random.Random(0))
            while own.position < HALF:
                await dialogue.step(1)
            assert not own.recoveries
            nursery.cancel_scope.cancel()


async def use_up(dialogue: Dialogue) -> None:
    while dialogue.session.position < HALF:
        await dialogue.step(1)


@simulated
async def test_rows_that_could_never_be_there_together_are_refused_before_any_work() -> None:
    """They wait for each other, so all have to fit. Another server may have the rest."""
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        client = await stack.enter_async_context(swarm.client(PATIENT))
        first, second = [client.router.open_session(HALF, Codec.RAW) for _ in range(2)]
        row = await stack.enter_async_context(first)
        await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW, row))
        await stack.enter_async_context(second)  # no row of these
        with trio.fail_after(0), pytest.raises(PeerRefused, match="600 positions in all, and this server has 400"):
            async with client.router.open_session(HALF, Codec.RAW, row):
                pass
        twin = await swarm.start("1", ALL_BLOCKS)
        await trio.sleep(20)
        other = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW, row))
        assert other.route[0].peer == twin.peer != node.peer


@simulated
async def test_a_session_that_cannot_grow_since_memory_has_run_out_goes_on_by_a_replay() -> None:
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        client = await stack.enter_async_context(swarm.client(PATIENT))
        session = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW))
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(PIECE)
        node.worker.executor.fails = 1
        for _ in range(3):
            await dialogue.step(1)
        (recovery,) = session.recoveries
        assert "others than sessions have the KV" in recovery.cause
        await session.close()
        await check_kv_is_free(swarm)


@simulated
async def test_a_server_announces_the_kv_that_a_newcomer_gets() -> None:
    """It keeps some for sessions that grow."""
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        client, other = [
            await stack.enter_async_context(swarm.client(PATIENT, name=each)) for each in ("client", "other")
        ]
        assert node.role.offer().kv_tokens_free == KV_TOKENS
        for number in range(3):
            session = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW))
            await Dialogue(session, random.Random(number)).step(100)
        announced = node.role.offer().kv_tokens_free
        assert node.worker.kv_tokens_free - int(AdmissionPolicy().growth_share * KV_TOKENS) == announced > 0
        opening = [other.router.open_session(length, Codec.RAW) for length in [PIECE] * (announced // PIECE)]
        with trio.fail_after(1):
            for each in opening:
                await stack.enter_async_context(each)
        assert node.role.offer().kv_tokens_free < PIECE
        node.worker.executor.occupy(node.worker.kv_tokens_free)
        assert node.role.offer().kv_tokens_free == 0


@simulated
async def test_a_replay_goes_where_there_is_kv_for_all_of_it() -> None:
    """A faster server has KV for a newcomer alone."""
    policy = replace(PATIENT, route=RoutePolicy(first_positions=PIECE))
    async with scarce() as swarm, AsyncExitStack() as stack:
        await swarm.start("first", ALL_BLOCKS, said_us=1)
        client = await stack.enter_async_context(swarm.client(policy))
        session = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW))
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(100)
        fast, slow = await swarm.start("fast", ALL_BLOCKS, said_us=500), await swarm.start("slow", ALL_BLOCKS)
        fast.worker.executor.occupy(KV_TOKENS - 50)
        fast.role.announce()
        await trio.sleep(20)
        swarm.kill("first")
        await dialogue.step(1)
        assert session.route[0].peer == slow.peer
        assert not fast.worker.executor.refused, "it was not asked"
        newcomer = await stack.enter_async_context(client.router.open_session(HALF, Codec.RAW))
        assert newcomer.route[0].peer == fast.peer


@simulated
async def test_a_session_that_is_copied_again_and_again_has_none_in_use_leave_that_has_just_come_in() -> None:
    """It is within its share. The sessions of the other client are not, and each of them would have to be replayed."""
    async with scarce() as swarm, AsyncExitStack() as stack:
        await swarm.start("0", ALL_BLOCKS)
        honest, hostile = [await stack.enter_async_context(swarm.client(PATIENT, name=each)) for each in ("a", "b")]
        dialogues: list[Dialogue] = []
        for number in range(2):
            session = await stack.enter_async_context(honest.router.open_session(HALF, Codec.RAW))
            dialogues.append(Dialogue(session, random.Random(number), policy=WAITING))
            await dialogues[-1].step(160)
        source = await stack.enter_async_context(hostile.router.open_session(HALF, Codec.RAW))
        await Dialogue(source, random.Random(2)).step(48)

        async def copy() -> None:
            while True:
                async with hostile.router.open_session(HALF, Codec.RAW, source) as copied:
                    await source.fork([copied])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy)
            until_s = trio.current_time() + AdmissionPolicy().keeps_s / 2
            while trio.current_time() < until_s:
                for each in dialogues:
                    await each.step(1)
                    await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        assert not any(each.session.recoveries for each in dialogues)


@simulated
async def test_sessions_that_have_to_go_cost_newcomers_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []
    moves_in_s = AdmissionQueue._moves_in_s

    def counted(queue: AdmissionQueue, lease: KvLease, wanted: int, now_s: float) -> float:
        spent.append(now_s)
        return moves_in_s(queue, lease, wanted, now_s)

    monkeypatch.setattr(AdmissionQueue, "_moves_in_s", counted)
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        hog, honest = [await stack.enter_async_context(swarm.client(PATIENT, name=each)) for each in ("hog", "honest")]
        dialogues: list[Dialogue] = []
        for number in range(4):
            session = await stack.enter_async_context(hog.router.open_session(HALF, Codec.RAW))
            dialogues.append(Dialogue(session, random.Random(number)))
            await dialogues[-1].step(90)
        await trio.sleep(AdmissionPolicy().idle_s)
        spent.clear()
        session = await stack.enter_async_context(honest.router.open_session(HALF, Codec.RAW))
        await Dialogue(session, random.Random(5)).step(100)
        hops = [hop for each in dialogues for hop in each.session._hops.hops]
        assert sum(hop.session not in node.server.sessions for hop in hops) == 1
        assert not spent


SOURCE, COPY, OTHER = (SessionId(letter * SESSION_ID_BYTES) for letter in (b"s", b"c", b"o"))


def step(session: SessionId, length: int) -> Frame:
    return Frame(FrameType.STEP, session, length=length, payload=bytes(length * ROW), value_bytes=4)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(FrameType.CLOSE, RefusalCode.UNKNOWN_SESSION), (FrameType.TRUNCATE, RefusalCode.WRONG_POSITION)],
)
@simulated
async def test_a_fork_is_refused_if_its_source_goes_or_shrinks_while_the_copy_gets_kv(
    kind: FrameType, code: RefusalCode
) -> None:
    asked = OpenRequest(
        MODEL.digest, 0, MODEL.blocks, HALF, MODEL.precision.name, Codec.RAW, "interactive", keep_outputs=False
    )
    async with scarce() as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        link = await swarm.internet.network("client").dial(node.network.addresses[0])
        async with open_connection(link) as connection:
            for session in (SOURCE, COPY, OTHER):
                await connection.ask(Frame(FrameType.OPEN, session, meta=pack(asked)), FrameType.OPENED, 5)
            await connection.ask(step(SOURCE, 20), FrameType.RESULT, 5)
            node.worker.gate = trio.Event()
            await connection.tell(step(OTHER, 1))
            await trio.sleep(1)
            with connection.expect(COPY, Epoch(1), Step(0)) as answer:
                fork = Frame(FrameType.FORK, COPY, Epoch(1), start=20, meta=pack(ForkRequest(SOURCE, 0)))
                await connection.tell(fork)
                await trio.sleep(1)
                await connection.tell(Frame(kind, SOURCE, Epoch(1)))
                await trio.sleep(1)
                node.worker.open_gate()
                with pytest.raises(PeerRefused) as refused:
                    await answer.receive(FrameType.FORKED, 5)
            assert refused.value.code == code
            await connection.ask(step(COPY, 3), FrameType.RESULT, 5)
        await check_kv_is_free(swarm)
