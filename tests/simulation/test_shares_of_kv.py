"""Sessions beside others that want KV too: those above their fair share make way, and come back."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import NO_SESSION, Epoch, PeerId, SessionId, Step
from llmnode.core.operations import Open
from llmnode.core.policy import AdmissionPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.kv_shares import KvClaim
from llmnode.errors import NoRoute, PeerRefused
from llmnode.testing import Dialogue, check_kv_is_free, simulate, simulated
from llmnode.testing.simulate import seeds
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, Replay, pack
from llmnode.wire.payload import Codec
from simulation.scarce import FIFTH, IMPATIENT, PATIENT, fill, world
from simulation.world import ALL_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.session.session import InferenceSession

IDLE_S = AdmissionPolicy().idle_s


@simulated
async def test_idle_sessions_above_their_share_make_way_and_go_on_elsewhere_or_here() -> None:
    """A client holds all KV of a server, and its sessions are idle. Another client is let in, and both stay exact."""
    async with world() as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        async with swarm.client(PATIENT) as client, swarm.client(IMPATIENT, name="other") as other:
            async with AsyncExitStack() as stack:
                dialogues = [Dialogue(each, random.Random(1)) for each in await fill(stack, client)]
                for each in dialogues:
                    await each.step(3)
                await trio.sleep(IDLE_S + 1)
                with trio.fail_after(1):
                    opened = await stack.enter_async_context(other.router.open_session(FIFTH, Codec.RAW))
                await Dialogue(opened, random.Random(2)).step(3)
                left = [each for each in dialogues if each.session.connections[node.peer]._gone]
                assert left, "its client was told at once"
                assert len(node.server.sessions) == 5
                twin = await swarm.start("1", ALL_BLOCKS)
                await trio.sleep(2)
                for each in dialogues:
                    await each.step(1)
                moved = [each for each in dialogues if each.session.recoveries]
                assert len(moved) == 1
                assert moved[0].session.route[0].peer == twin.peer
                await opened.close()
            assert not client.router.finder.banned and not other.router.finder.banned
        await check_kv_is_free(swarm)


@simulated
async def test_frames_that_compute_nothing_do_not_keep_a_session_in_use() -> None:
    """The client has no next hop, asks for results that are not logged, and goes back to where it is.

    It asks seldom: its link ends if it asks for many results that are not there.
    """
    async with world() as swarm:
        await swarm.start("0", ALL_BLOCKS)
        async with (
            swarm.client(PATIENT) as client,
            swarm.client(IMPATIENT, name="other") as other,
            AsyncExitStack() as stack,
        ):
            opened = await fill(stack, client)
            for number in (1, 2):
                await trio.sleep(IDLE_S / 2 + 1)
                for (hop,) in (each._hops.hops for each in opened):
                    at = hop.session, Epoch(number), Step(number)
                    nobody = pack(Neighbours("", "", NO_SESSION, quiet=False, again=False))
                    for kind, meta in (
                        (FrameType.NEIGHBOURS, nobody),
                        (FrameType.REPLAY, pack(Replay(push=False))),
                        (FrameType.TRUNCATE, b""),
                    ):
                        await hop.connection.tell(Frame(kind, *at, length=1, meta=meta))
            with trio.fail_after(1):
                await stack.enter_async_context(other.router.open_session(FIFTH, Codec.RAW))
        await check_kv_is_free(swarm)


@simulated
async def test_a_session_that_was_moved_comes_back_when_there_is_space() -> None:
    async with world() as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        async with (
            swarm.client(PATIENT) as client,
            swarm.client(IMPATIENT, name="other") as other,
            AsyncExitStack() as stack,
        ):
            dialogues = [Dialogue(each, random.Random(1)) for each in await fill(stack, client)]
            await trio.sleep(IDLE_S + 1)
            async with other.router.open_session(FIFTH, Codec.RAW) as opened:
                await Dialogue(opened, random.Random(2)).step(3)
            began_s = trio.current_time()
            for each in dialogues:
                await each.step(3)
            assert trio.current_time() - began_s < 2, "there is space again: nobody has to wait for it"
            assert sum(len(each.session.recoveries) for each in dialogues) == 1
            assert {hop.peer for each in dialogues for hop in each.session.route} == {node.peer}
        await check_kv_is_free(swarm)


@simulated
async def test_busy_sessions_make_way_only_down_to_the_share_of_their_holder_and_stay_exact() -> None:
    """One client uses five sessions all the time. Others take half of the KV, and no more."""
    async with world() as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        async with (
            swarm.client(PATIENT) as client,
            swarm.client(PATIENT, name="other") as other,
            AsyncExitStack() as stack,
        ):

            async def use(session: InferenceSession, rng: random.Random) -> None:
                dialogue = Dialogue(session, rng)
                with suppress(NoRoute):  # without space for it
                    while session.position < FIFTH - 1:
                        await dialogue.step(1)
                        await trio.sleep(2)

            held = await fill(stack, client)
            async with trio.open_nursery() as nursery:
                for each in held:
                    nursery.start_soon(use, each, random.Random(1))
                opened: list[InferenceSession] = []

                async def open_more() -> None:
                    for _ in range(3):
                        opened.append(await stack.enter_async_context(other.router.open_session(FIFTH, Codec.RAW)))
                        nursery.start_soon(use, opened[-1], random.Random(2))

                nursery.start_soon(open_more)
                await trio.sleep(60)
                clients = [each.client for each in node.server.sessions.values() if each.has_kv]
                assert len(opened) == 2 and clients.count(other.peer) == 2
                assert clients.count(client.peer) == 3, "it keeps what is left above its share, in whole sessions"
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", seeds(10))
def test_clients_that_want_more_than_there_is_do_not_move_each_other_in_turn(seed: int) -> None:
    simulate(partial(contend, seed), seed=seed)


async def contend(seed: int) -> None:
    """Clients use all sessions that they can get, all the time. After a while nobody is moved any more."""
    rng, moves = random.Random(seed), 0
    async with world(seed) as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        admission = node.server.served.admission
        choose = admission._queue.choose_moves

        def counted(now_s: float) -> Sequence[SessionId]:
            nonlocal moves
            chosen = choose(now_s)
            moves += len(chosen)
            return chosen

        admission._queue.choose_moves = counted  # type: ignore[method-assign]  # to count them
        waiting: list[SessionId] = []
        async with trio.open_nursery() as nursery:

            async def insist(client: str, positions: int) -> None:
                while True:
                    name = SessionId(rng.randbytes(16))
                    ended = trio.Event()
                    try:
                        claim = KvClaim(PeerId(client), client, Priority.INTERACTIVE, positions)
                        opening = Open(name, ALL_BLOCKS, positions)
                        await admission.enter(opening, claim, lambda _why, ended=ended: ended.set())
                        waiting.append(name)
                        while not ended.is_set():
                            admission.use(name, ends=True)
                            with trio.move_on_after(3):
                                await ended.wait()
                    except PeerRefused:
                        pass
                    await admission.leave(name)
                    await trio.sleep(1)

            for client in ["a", "b", "c"][: rng.randint(2, 3)]:
                for _ in range(rng.randint(3, 8)):
                    nursery.start_soon(insist, client, rng.randint(10, 100))
                await trio.sleep(rng.uniform(0, 30))
            await trio.sleep(300)
            settled = moves
            await trio.sleep(300)
            assert moves == settled
            nursery.cancel_scope.cancel()
