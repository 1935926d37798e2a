"""Rights to push: a server pushes what was granted to it, and pays for anything else itself."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.budget import Resource
from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy
from llmnode.errors import PeerUnreachable
from llmnode.testing import Conditions, check_coverage, peer_named
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, Refusal, RefusalCode, Replay, pack, unpack
from llmnode.wire.payload import Codec
from llmnode.wire.push_messages import PushLimit
from simulation.pushes import a_session, answers, held, link_between, neighbours, open_frame, pushed_step, sessions_of
from simulation.world import DELAY_S, ROW, SPANS, Dialogue, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.session.session import InferenceSession

POLICY = ServePolicy()
AT_ONCE = POLICY.unasked_burst


@simulated
async def test_nothing_is_pushed_to_a_session_that_does_not_expect_it() -> None:
    """Else 55 bytes of a client make one server send another a whole log, again and again."""
    name, unknown = SessionId(b"a" * 16), SessionId(b"u" * 16)
    async with pairs_of_servers() as swarm:
        near, far = swarm.nodes["0a"], swarm.nodes["1a"]
        link = await swarm.internet.network("hostile").dial(near.network.addresses[0])
        await link.send(open_frame(name, 0))
        await link.send(neighbours(name, 1, receiver="1a", session=unknown))
        await link.send(Frame(FrameType.STEP, name, length=50, payload=bytes(50 * ROW)))
        kinds = [each.type for each in await answers(link, 3)]
        assert kinds == [FrameType.OPENED, FrameType.FORWARDED, FrameType.RESULT]
        before = far.network.traffic.received_bytes
        for number in range(50):
            await link.send(Frame(FrameType.REPLAY, name, Epoch(0), Step(number), 0, 50, pack(Replay(push=True))))
            (answer,) = await answers(link, 1)
            assert len(answer.payload) == 50 * ROW, "it goes to the client, which has asked for it"
        assert far.network.traffic.received_bytes == before


@simulated
async def test_a_log_is_pushed_a_few_times_and_not_as_often_as_its_client_likes() -> None:
    """The client has sessions at both servers, and begins an epoch each time."""
    first, second = SessionId(b"a" * 16), SessionId(b"b" * 16)
    positions, replays = 50, 40
    async with pairs_of_servers() as swarm:
        near, far = swarm.nodes["0a"], swarm.nodes["1a"]
        hostile = swarm.internet.network("hostile")
        links = [await hostile.dial(each.network.addresses[0]) for each in (near, far)]
        await links[0].send(open_frame(first, 0))
        await links[1].send(open_frame(second, 1))
        await links[1].send(neighbours(second, 1, sender="0a"))
        await answers(links[1], 2)
        await links[0].send(neighbours(first, 1, receiver="1a", session=second))
        await links[0].send(Frame(FrameType.STEP, first, length=positions, payload=bytes(positions * ROW)))
        await answers(links[0], 3)
        before = far.network.traffic.received_bytes
        began_s = trio.current_time()
        for number in range(1, replays):
            at = Epoch(number), Step(number)
            await links[1].send(Frame(FrameType.TRUNCATE, second, *at, start=0))
            await links[0].send(Frame(FrameType.REPLAY, first, *at, 0, positions, pack(Replay(push=True))))
            await answers(links[0], 1)
        seconds = trio.current_time() - began_s
        times = (far.network.traffic.received_bytes - before) / (positions * ROW)
        assert 1 <= times <= POLICY.replayed_times + seconds / POLICY.replayed_every_s < replays / 4


@simulated
async def test_a_hop_that_opens_the_session_at_the_next_one_in_the_client_s_place_keeps_no_client_out() -> None:
    """A hop is told the name of that session, and may be nearer. The next hop seemed to refuse the client."""
    async with world() as swarm:
        nodes = [await swarm.start(str(number), span) for number, span in enumerate(SPANS)]
        await check_coverage(swarm)
        near, far = nodes[:2]
        link = await near.network.dial(far.network.addresses[0])
        taken = list[SessionId]()

        def squat(_receiver: PeerId, frame: Frame) -> list[Frame]:
            if frame.type is FrameType.NEIGHBOURS and (request := unpack(Neighbours, frame.meta)).receiver == far.peer:
                taken.append(SessionId(request.receiver_session))
                link._send(open_frame(taken[-1], 1))
            return [frame]

        async with swarm.client() as (router, client):
            await router.find_any()
            swarm.internet.set_conditions(client, far.peer, Conditions(delay_s=10 * DELAY_S))
            router.finder.pool.network.tamper = squat  # type: ignore[attr-defined]  # it is in memory
            async with router.open_session(64, Codec.RAW) as session:
                assert taken, "it has opened one"
                assert not router.finder.records.broken.has_any, "nobody is blamed"
                dialogue = Dialogue(session, random.Random(1))
                for _ in range(3):
                    await dialogue.step(3)
                assert not session.recoveries
        assert near.server.tally.pushed > 0


@simulated
async def test_nor_from_a_server_that_takes_over_a_lost_hop() -> None:
    async with (
        pairs_of_servers() as swarm,
        swarm.client() as (router, client),
        router.open_session(64, Codec.RAW) as session,
    ):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(3)
        lost = swarm.node(session.route[1].peer)
        (other,) = (node for name, node in swarm.nodes.items() if name[0] == "1" and node is not lost)
        link = await swarm.internet.network("hostile").dial(other.network.addresses[0])
        taken = list[SessionId]()

        def squat(_receiver: PeerId, frame: Frame) -> list[Frame]:
            if frame.type is FrameType.NEIGHBOURS:
                request = unpack(Neighbours, frame.meta)
                if request.receiver == other.peer:
                    taken.append(SessionId(request.receiver_session))
                    link._send(open_frame(taken[-1], 1))
            return [frame]

        router.finder.pool.network.tamper = squat  # type: ignore[attr-defined]  # it is in memory
        swarm.internet.set_conditions(client, other.peer, Conditions(delay_s=10 * DELAY_S))
        swarm.kill(lost.name)
        await dialogue.step(3)
        (recovery,) = session.recoveries
        assert taken and recovery.taken_over_by == (other.peer,)
        assert recovery.stall_s < 2
        assert not router.finder.records.broken.has_any, "nobody is blamed"


@simulated
async def test_a_former_sender_s_pushes_cost_its_link_and_not_the_session() -> None:
    async with a_session() as (swarm, session, dialogue):
        first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
        (served,) = sessions_of(victim)
        await session._hops.hops[1].carry_out(*_revoked(session))
        assert served.inbox.pushes.sender is None
        before = held(victim, Resource.MEMORY, served.client)
        link = link_between(first, victim)
        granted = victim.server.desk._late_bytes[first.peer]
        step = pushed_step(served, number=7)
        late = granted // step.size_bytes
        for number in range(late + AT_ONCE):
            await link.send(step)
            assert not link._error, number
        await trio.sleep(1)
        assert not link._error
        for _ in range(5):
            await link.send(step)
        await trio.sleep(1)
        assert link._error, "the link ends: more late pushes than were granted"
        assert held(victim, Resource.MEMORY, served.client) == before, "the client does not pay for it"
        await dialogue.step(1)
        assert not session.recoveries


@simulated
async def test_the_first_push_that_does_not_fit_ends_the_right_and_no_link_or_session() -> None:
    async with a_session() as (swarm, session, dialogue):
        first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
        (served,) = sessions_of(victim)
        link = link_between(first, victim)
        step = pushed_step(served, number=7)
        for _ in range(AT_ONCE):
            await link.send(replace(step, payload=step.payload[1:]))
        await trio.sleep(1)
        assert served.inbox.pushes.sender is None
        assert not link._error, "the others came late"
        await dialogue.step(1)
        assert not session.recoveries


def _revoked(session: InferenceSession):  # type: ignore[no-untyped-def]  # requests of a session's state
    hops = session._hops.hops
    hops[0].pushing.is_trusted = False
    state = session._hops.state
    return [hops[1].set_neighbours(hops[0], hops[2], state.epoch, Step(state.step + 1), 0.0, quiet=False)]


@pytest.mark.parametrize("epoch", [0, 50], ids=["over", "to come"])
@simulated
async def test_pushes_of_epochs_that_are_over_or_to_come_cost_their_peer(epoch: int) -> None:
    async with a_session() as (swarm, session, dialogue):
        await dialogue.go_back(1)
        await dialogue.step(1)
        first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
        (served,) = sessions_of(victim)
        assert served.stage.epoch == 1
        link = link_between(first, victim)
        before = held(victim, Resource.MEMORY, served.client)
        taken = served.inbox.pushes
        step = pushed_step(served, epoch)
        assert not taken.take(step, served.stage.epoch, victim.server.desk._links[first.peer][0])
        count = 0
        with suppress(PeerUnreachable):
            while count < 5000:
                await link.send(step)
                count += 1
                if count % 50 == 0:
                    await trio.sleep(0.2)
        assert AT_ONCE <= count < 5000
        assert not served.stage.held
        assert held(victim, Resource.MEMORY, served.client) == before, "the client does not pay for it"
        await dialogue.step(1)
        assert not session.recoveries, "the session goes on by way of the client"


@simulated
async def test_a_push_beyond_the_grant_is_dropped_and_the_client_makes_it_good() -> None:
    async with a_session() as (swarm, session, dialogue):
        first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
        (served,) = sessions_of(victim)
        pushes = served.inbox.pushes
        way = victim.server.desk._links[first.peer][0]
        pushes._grant.limit_bytes = pushes._grant.received_bytes
        pushes._settle_memory()
        assert held(victim, Resource.PUSHES) == 0
        assert not pushes.take(pushed_step(served, served.stage.epoch), served.stage.epoch, way)
        await dialogue.step(1)
        assert not session.timings[1].direct
        assert not session.recoveries


@simulated
async def test_what_is_granted_counts_for_the_peer_that_pushes_and_ends_with_the_session() -> None:
    async with pairs_of_servers() as swarm:
        async with swarm.session(max_length=60) as (session, client):
            await Dialogue(session, random.Random(1)).step(3)
            first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
            granted = held(victim, Resource.PUSHES)
            assert 0 < granted <= POLICY.pushed_times * 60 * (ROW + 256)
            assert held(victim, Resource.PUSHES, first.peer) == granted
            assert not held(victim, Resource.PUSHES, client)
        await trio.sleep(1)
        assert held(victim, Resource.PUSHES) == 0


@simulated
async def test_without_memory_for_grants_results_go_by_way_of_the_client_and_are_pushed_again_later() -> None:
    async with pairs_of_servers() as swarm:
        processes = [swarm.nodes[name].network.budget.process for name in ("1a", "1b")]
        for process in processes:
            process.held[Resource.PUSHES] += process.limit(Resource.PUSHES) or 0
        async with swarm.session(max_length=60) as (session, _):
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(3)
            assert [each.direct for each in session.timings] == [False, False, True]
            for process in processes:
                process.held[Resource.PUSHES] = 0
            for _ in range(4):
                await trio.sleep(3)
                await dialogue.step(1)
            assert [each.direct for each in session.timings] == [False, True, True]
            assert not session.recoveries


@simulated
async def test_a_session_that_is_full_keeps_no_other_session_of_the_link_waiting() -> None:
    """Two sessions that the same peer pushes to. The first takes no more, the second goes on."""
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        for name in ("0b", "1b"):
            swarm.kill(name)
        await trio.sleep(60)
        async with router.open_session(60, Codec.RAW) as one, router.open_session(60, Codec.RAW) as two:
            dialogues = [Dialogue(each, random.Random(1)) for each in (one, two)]
            for each in dialogues:
                await each.step(3)
            first, victim = swarm.nodes["0a"], swarm.nodes["1a"]
            (served,) = [each for each in sessions_of(victim) if each.stage.session == one._hops.hops[1].session]
            link = link_between(first, victim)
            for number in range(100):
                await link.send(replace(pushed_step(served, served.stage.epoch, number=40 + number), start=3))
            began_s = trio.current_time()
            await dialogues[1].step(1)
            assert trio.current_time() - began_s < 0.5
            await dialogues[0].step(1)
            assert not one.recoveries and not two.recoveries


@simulated
async def test_a_session_that_is_busy_takes_a_few_pushed_steps_ahead() -> None:
    async with a_session() as (swarm, session, dialogue):
        first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
        (served,) = sessions_of(victim)
        pushes, link = served.inbox.pushes, link_between(first, victim)
        victim.worker.gate = trio.Event()
        due = pushed_step(served, served.stage.epoch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialogue.step, 1)
            await trio.sleep(1)
            assert len(pushes._queued) == 1, "it is computed"
            for _ in range(4 * POLICY.pushed_ahead):
                await link.send(replace(due, step=Step(due.step + 1), start=due.start + 1))
            await trio.sleep(1)
            assert len(pushes._queued) + len(pushes._held) == POLICY.pushed_ahead
            assert held(victim, Resource.PUSHES) == pushes._waiting_bytes + pushes._grant.left_bytes
            victim.worker.open_gate()
        assert not session.recoveries


@simulated
async def test_a_want_for_an_unknown_session_is_answered_when_the_client_has_named_the_peer() -> None:
    """The next hop may hear of the session later than of what is to be pushed to it."""
    name = SessionId(b"b" * 16)
    async with pairs_of_servers() as swarm:
        node = swarm.nodes["1a"]
        sender, client = (swarm.internet.network(each) for each in ("sender", "hostile"))
        asking, asked = [await each.dial(node.network.addresses[0]) for each in (sender, client)]
        await asking.send(Frame(FrameType.WANT, name, step=Step(5), meta=pack(PushLimit(0))))
        await trio.sleep(1)
        await asked.send(open_frame(name, 1))
        await asked.send(neighbours(name, 1, sender="sender"))
        await answers(asked, 2)
        (grant,) = await answers(asking, 1)
        assert (grant.type, grant.session, grant.epoch, grant.step) == (FrameType.GRANT, name, 0, 5)
        assert unpack(PushLimit, grant.meta).limit_bytes > 0
        await asked.send(Frame(FrameType.TRUNCATE, name, Epoch(1)))
        (grant,) = await answers(asking, 1)
        assert grant.epoch == 1
        await asked.send(replace(neighbours(name, 2), epoch=Epoch(1)))
        (grant,) = await answers(asking, 1)
        assert unpack(PushLimit, grant.meta).limit_bytes == 0, "the right is taken away"
        await asking.send(Frame(FrameType.STEP, name, Epoch(1), Step(0), 0, 1, b"", bytes(ROW)))
        await trio.sleep(1)
        assert node.server.sessions[name].stage.position == 0


@simulated
async def test_wants_for_sessions_that_are_not_there_are_forgotten_in_the_end() -> None:
    async with pairs_of_servers() as swarm:
        node = swarm.nodes["1a"]
        link = await swarm.internet.network("hostile").dial(node.network.addresses[0])
        rng = random.Random(1)
        for _ in range(1200):  # more would wait for their turn, and overrun the queue
            await link.send(Frame(FrameType.WANT, SessionId(rng.randbytes(16)), meta=pack(PushLimit(2**62))))
        await trio.sleep(2)
        (grants,) = node.server.desk._links[peer_named("hostile")]
        assert len(grants.asked) <= 1024
        await link.end("done")
        await trio.sleep(1)
        assert peer_named("hostile") not in node.server.desk._links


@simulated
async def test_a_malformed_want_is_refused_and_counts_as_malformed() -> None:
    async with pairs_of_servers() as swarm:
        link = await swarm.internet.network("hostile").dial(swarm.nodes["1a"].network.addresses[0])
        await link.send(Frame(FrameType.WANT, SessionId(b"b" * 16), meta=b"x"))
        (answer,) = await answers(link, 1)
        assert unpack(Refusal, answer.meta).code == RefusalCode.BAD_MESSAGE
