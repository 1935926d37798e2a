"""The refusals of a server, and the parts of a session that it copies or sends again. The link lives on."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from llmnode.core.ids import NO_SESSION, Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy
from llmnode.errors import PeerRefused, PeerUnreachable
from llmnode.net.host import open_network
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import ForkRequest, Neighbours, Refusal, RefusalCode, Replay, Replayed, pack, unpack
from llmnode.wire.push_messages import PushLimit
from unit.in_trio import in_trio
from unit.links import (
    DESCRIBE,
    POLICY,
    ROW,
    answer_to,
    connected,
    open_frame,
    opened,
    refusal_to,
    served,
    session_id,
    step_frame,
)

REFUSED_OPENS = {
    "wrong model": ({"model_digest": b"x" * 32}, RefusalCode.WRONG_MODEL),
    "wrong dtype": ({"dtype": "float16"}, RefusalCode.WRONG_MODEL),
    "unknown codec": ({"codec": "zip"}, RefusalCode.UNKNOWN_CODEC),
    "span not held": ({"span_end": 5}, RefusalCode.SPAN_NOT_HELD),
    "empty span": ({"span_start": 4}, RefusalCode.BAD_MESSAGE),
    "longer than the context": ({"max_length": 101}, RefusalCode.NO_ROOM),
    "an unknown extension": ({"required": ["news"]}, RefusalCode.UNKNOWN_EXTENSION),
    "an adapter": ({"adapter": b"a" * 32}, RefusalCode.UNKNOWN_ADAPTER),
    "more KV than there is": ({"max_length": 65}, RefusalCode.NO_ROOM),
}


@pytest.mark.parametrize(("changes", "code"), REFUSED_OPENS.values(), ids=REFUSED_OPENS.keys())
@in_trio
async def test_an_open_is_refused(exact_worker: Any, changes: dict[str, Any], code: RefusalCode) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        assert (await refusal_to(link, open_frame(session_id(), **changes))).code == code
        assert (await answer_to(link, open_frame(session_id()))).type is FrameType.OPENED
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@pytest.mark.parametrize("more", [{"priority": "urgent"}, {"extensions": {"news": 1}}], ids=str)
@in_trio
async def test_an_open_of_a_newer_client_is_granted_if_it_requires_nothing(
    exact_worker: Any, more: dict[str, Any]
) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link, session = await network.dial(swarm.address), session_id()
        assert (await answer_to(link, open_frame(session, **more))).type is FrameType.OPENED
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT
        await link.end("done")


@in_trio
async def test_a_frame_of_a_newer_version_is_refused_and_its_session_and_link_go_on(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link, session = await network.dial(swarm.address), session_id()
        assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
        for name in (session, NO_SESSION):
            frame = Frame(FrameType(99), name, Epoch(0), Step(7), payload=b"news")
            refusal = await refusal_to(link, frame)
            assert (refusal.code, refusal.message) == (RefusalCode.UNKNOWN_FRAME, "this llmnode knows no frame TYPE_99")
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT
        await link.end("done")


@in_trio
async def test_neighbours_that_require_an_unknown_extension_are_refused_by_its_name(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link, session = await network.dial(swarm.address), session_id()
        assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
        asked = Neighbours("", "", NO_SESSION, quiet=False, again=False, extensions={"a": 1}, required=["news"])
        refusal = await refusal_to(link, Frame(FrameType.NEIGHBOURS, session, meta=pack(asked)))
        assert refusal.code == RefusalCode.UNKNOWN_EXTENSION
        assert "'news'" in refusal.message
        again = Frame(FrameType.NEIGHBOURS, session, meta=pack(replace(asked, required=None)))
        assert (await answer_to(link, again)).type is FrameType.FORWARDED
        await link.end("done")


@in_trio
async def test_who_asks_for_another_model_is_told_how_this_one_differs(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        refusal = await refusal_to(link, open_frame(session_id(), dtype="float16"))
        assert refusal.message.endswith(" in float32, and float16 is asked for")
        refusal = await refusal_to(link, open_frame(session_id(), model_digest=b"x" * 32))
        assert refusal.message.endswith(" of other weights")
        refusal = await refusal_to(link, open_frame(session_id(), span_end=5))
        assert refusal.message == "[0, 5) asked for, [0, 4) held"
        await link.end("done")


@in_trio
async def test_a_name_is_open_once_whoever_opens_it(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as ours, open_network([], POLICY) as others:
        link, other = await ours.dial(swarm.address), await others.dial(swarm.address)
        session = session_id()
        assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
        for second in (link, other):
            assert (await refusal_to(second, open_frame(session))).code == RefusalCode.CONFLICT
        assert (await refusal_to(other, step_frame(session, 0, 0))).code == RefusalCode.UNKNOWN_SESSION
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT


@in_trio
async def test_sessions_over_one_link_are_limited(exact_worker: Any) -> None:
    async with served(exact_worker, serve=ServePolicy(sessions_per_link=2)) as swarm:
        async with open_network([], POLICY) as network:
            link = await network.dial(swarm.address)
            for _ in range(2):
                assert (await answer_to(link, open_frame(session_id()))).type is FrameType.OPENED
            assert (await refusal_to(link, open_frame(session_id()))).code == RefusalCode.BUSY
        await swarm.check_serves_and_is_empty()


UNASKED = [
    FrameType.DESCRIPTION,
    FrameType.OPENED,
    FrameType.RESULT,
    FrameType.TRUNCATED,
    FrameType.FORKED,
    FrameType.REFUSAL,
]


@in_trio
async def test_frames_that_make_no_sense_are_refused(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session))
        step = step_frame(session, 0, 0)
        for frame, code in [
            *((Frame(kind, session), RefusalCode.BAD_MESSAGE) for kind in UNASKED),
            (replace(DESCRIBE, meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (open_frame(NO_SESSION), RefusalCode.BAD_MESSAGE),
            (replace(open_frame(session_id()), meta=b"\xc1"), RefusalCode.BAD_MESSAGE),
            (step_frame(session_id(), 0, 0), RefusalCode.UNKNOWN_SESSION),
            (Frame(FrameType.CLOSE, session_id()), RefusalCode.UNKNOWN_SESSION),
            (replace(step, meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (replace(step, length=0, payload=b""), RefusalCode.BAD_MESSAGE),
            (replace(step, length=2**32 - 1), RefusalCode.BAD_MESSAGE),
            (replace(step, start=2**32 - 1), RefusalCode.NO_ROOM),
            (step_frame(session, 0, 0, length=17), RefusalCode.NO_ROOM),
            (step_frame(session, 0, start=1), RefusalCode.WRONG_POSITION),
            (Frame(FrameType.REPLAY, session, length=1, meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (Frame(FrameType.REPLAY, session, length=1, meta=pack(Replay(push=False))), RefusalCode.BAD_MESSAGE),
            (Frame(FrameType.TRUNCATE, session, Epoch(0)), RefusalCode.STALE_EPOCH),
            (Frame(FrameType.TRUNCATE, session, Epoch(1), start=1), RefusalCode.WRONG_POSITION),
        ]:
            assert (await refusal_to(link, frame)).code == code, frame
        assert (await answer_to(link, step)).type is FrameType.RESULT
        await link.end("done")
        await swarm.check_serves_and_is_empty()


def fork_frame(session: SessionId, source: SessionId, keep: int, shared: int = 0) -> Frame:
    return Frame(FrameType.FORK, session, Epoch(1), Step(1), start=keep, meta=pack(ForkRequest(source, shared)))


@in_trio
async def test_a_session_that_waits_for_kv_is_no_source_and_ends_when_it_is_closed(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, waiting = session_id(), session_id()
        await answer_to(link, open_frame(session, max_length=40))
        await link.send(open_frame(waiting, max_length=40))
        refusal = await refusal_to(link, fork_frame(session, waiting, 0))
        assert refusal.code == RefusalCode.UNKNOWN_SESSION
        assert set(swarm.server.sessions) == {session, waiting}
        ended = swarm.server.session_ended
        await link.send(Frame(FrameType.CLOSE, waiting))
        await ended.wait()
        assert set(swarm.server.sessions) == {session}
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_session_is_a_copy_of_another_one_of_its_client_alone(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network, open_network([], POLICY) as others:
        link, other_link = await network.dial(swarm.address), await others.dial(swarm.address)
        session, source, fresh, part, coded, foreign = (session_id() for _ in range(6))
        for name in (session, source):
            await answer_to(link, open_frame(name))
            assert (await answer_to(link, step_frame(name, 0, 0, length=2))).type is FrameType.RESULT
        await answer_to(link, open_frame(fresh, max_length=1))
        await answer_to(link, open_frame(part, span_end=2, max_length=1))
        await answer_to(link, open_frame(coded, codec="fp16", max_length=1))
        await answer_to(other_link, open_frame(foreign))
        assert len(swarm.server.sessions) == 6
        await answer_to(other_link, step_frame(foreign, 0, 0, length=2))
        for frame, code in [
            (replace(fork_frame(session, source, 2), meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (fork_frame(session_id(), source, 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(foreign, source, 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, session_id(), 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, NO_SESSION, 0), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, foreign, 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, session, 2), RefusalCode.CONFLICT),
            (fork_frame(session, part, 0), RefusalCode.CONFLICT),
            (fork_frame(session, coded, 0), RefusalCode.CONFLICT),
            (fork_frame(session, source, 3), RefusalCode.WRONG_POSITION),
            (fork_frame(session, source, 2**32 - 1), RefusalCode.NO_ROOM),
            (fork_frame(session, source, 2, shared=3), RefusalCode.WRONG_POSITION),
            (fork_frame(fresh, source, 2, shared=1), RefusalCode.NO_ROOM),
            (fork_frame(fresh, source, 1, shared=1), RefusalCode.WRONG_POSITION),
            (replace(fork_frame(session, source, 2), epoch=Epoch(0)), RefusalCode.STALE_EPOCH),
        ]:
            assert (await refusal_to(link, frame)).code == code, frame
        again = await answer_to(link, step_frame(session, 0, 0, length=2))
        assert again.type is FrameType.RESULT, "it stands where it stood"
        copied = await answer_to(link, fork_frame(fresh, source, 1))
        assert (copied.type, copied.session, copied.epoch, copied.start) == (FrameType.FORKED, fresh, 1, 1)
        await link.end("done")
        await other_link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_copy_has_the_logged_results_of_its_positions_and_no_others(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, source, other = session_id(), session_id(), session_id()
        for name in (session, source):
            await answer_to(link, open_frame(name, keep_outputs=True))
        await answer_to(link, open_frame(other))
        results = bytes((await answer_to(link, step_frame(source, 0, 0, length=3))).payload)
        assert (await refusal_to(link, fork_frame(other, source, 0))).code == RefusalCode.CONFLICT
        await answer_to(link, fork_frame(session, source, 2))
        next_step = replace(step_frame(session, 1, 2), epoch=Epoch(1), payload=bytes([7] * ROW))
        result = bytes((await answer_to(link, next_step)).payload)
        replay = Frame(FrameType.REPLAY, session, Epoch(9), Step(0), 0, 3, pack(Replay(push=False)))
        assert bytes((await answer_to(link, replay)).payload) == results[: 2 * ROW] + result
        again = await answer_to(link, replace(replay, session=source))
        assert bytes(again.payload) == results, "the source has its own"


@in_trio
async def test_a_session_that_computes_is_no_source_yet(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, source = session_id(), session_id()
        for name in (session, source):
            await answer_to(link, open_frame(name))
        await link.send(step_frame(source, 0, 0))
        await exact_worker.executor.forward_began.wait()
        assert (await refusal_to(link, fork_frame(session, source, 0))).code == RefusalCode.BUSY
        exact_worker.gate.set()
        assert (await link.receive()).type is FrameType.RESULT
        assert (await answer_to(link, fork_frame(session, source, 1))).type is FrameType.FORKED


@in_trio
async def test_a_source_without_kv_that_is_about_to_be_closed_can_be_named(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, source = session_id(), session_id()
        await answer_to(link, open_frame(session))
        for frame in (open_frame(source, max_length=100), fork_frame(session, source, 0)):
            await link.send(frame)
        answers = [await link.receive() for _ in range(2)]
        assert RefusalCode.NO_ROOM in {
            unpack(Refusal, each.meta).code for each in answers if each.type is FrameType.REFUSAL
        }
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_logged_results_are_given_again_as_far_as_they_go(exact_worker: Any) -> None:
    async with served(exact_worker, serve=ServePolicy(replay_bytes=3 * ROW)) as swarm, open_network([], POLICY) as near:
        link = await near.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session, keep_outputs=True))
        result = await answer_to(link, step_frame(session, 0, 0, length=5))

        def replay(start: int, length: int) -> Frame:
            return Frame(FrameType.REPLAY, session, Epoch(9), Step(7), start, length, pack(Replay(push=True)))

        again = await answer_to(link, replay(1, 3))
        assert (again.type, again.epoch, again.step) == (FrameType.REPLAYED, 9, 7)
        assert bytes(again.payload) == bytes(result.payload)[ROW : 4 * ROW]
        assert not unpack(Replayed, again.meta).pushed, "there is nobody to push it to"
        for start, length in [(0, 0), (0, 4), (3, 3), (5, 1), (2**32 - 1, 2**32 - 1)]:
            assert (await refusal_to(link, replay(start, length))).code == RefusalCode.BAD_MESSAGE
        await answer_to(link, Frame(FrameType.TRUNCATE, session, Epoch(1), Step(1), start=2))
        assert (await refusal_to(link, replay(2, 1))).code == RefusalCode.BAD_MESSAGE
        assert bytes((await answer_to(link, replay(1, 1))).payload) == bytes(result.payload)[ROW : 2 * ROW]
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_step_after_close_is_refused(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session))
        await link.send(step_frame(session, 0, 0))
        await link.send(Frame(FrameType.CLOSE, session))
        late = step_frame(session, 1, 1)
        assert (await refusal_to(link, late)).code == RefusalCode.UNKNOWN_SESSION
        exact_worker.gate.set()
        assert (await link.receive()).type is FrameType.RESULT  # frames before the CLOSE are still answered
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_client_that_has_not_heard_of_the_end_of_its_session_keeps_its_link(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link, other = await network.dial(swarm.address), session_id()
        session = session_id()
        await link.send(Frame(FrameType.WANT, other, meta=pack(PushLimit(1))))  # it pushes to sessions of others too
        await answer_to(link, open_frame(session))
        await link.send(Frame(FrameType.CLOSE, session))
        await swarm.check_serves_and_is_empty()
        for step in range(2 * ServePolicy().unasked_burst):
            assert (await refusal_to(link, step_frame(session, step, step))).code == RefusalCode.UNKNOWN_SESSION
        assert (await answer_to(link, open_frame(other))).type is FrameType.OPENED
        await link.end("done")


@in_trio
async def test_steps_that_nobody_asked_for_count_for_the_address_group(exact_worker: Any) -> None:
    """One peer sends what the group may, and the next step of another peer costs its link."""
    policy = ServePolicy(unasked_per_s=0.001)
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(served(exact_worker, serve=policy))
        links = []
        for _ in range(2):
            network = await stack.enter_async_context(open_network([], POLICY))
            links.append(link := await network.dial(swarm.address))
            await link.send(Frame(FrameType.WANT, session_id(), meta=pack(PushLimit(1))))
        nobodys = step_frame(session_id(), 0, 0)
        for _ in range(policy.unasked_burst):
            assert (await refusal_to(links[0], nobodys)).code == RefusalCode.UNKNOWN_SESSION
        with pytest.raises(PeerUnreachable):
            await answer_to(links[1], nobodys)
        assert (await answer_to(links[0], DESCRIBE)).type is FrameType.DESCRIPTION


@in_trio
async def test_steps_that_wait_are_limited(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session))
        for step in range(16):
            await link.send(step_frame(session, step, step))
        for _ in range(16):
            await link.send(step_frame(session, 0, 0))
        assert unpack(Refusal, (await link.receive()).meta).code == RefusalCode.TOO_FAR_AHEAD
        exact_worker.gate.set()
        while (await link.receive()).type is FrameType.REFUSAL:
            pass


@in_trio
async def test_a_refusal_names_its_code_once(exact_worker: Any) -> None:
    async with (
        served(exact_worker) as swarm,
        open_network([], POLICY) as network,
        connected(network, swarm.address) as connection,
    ):
        with pytest.raises(PeerRefused) as caught:
            async with opened(connection, max_length=1000):
                raise AssertionError("opened")
    assert caught.value.code == RefusalCode.NO_ROOM
    assert str(caught.value).count("refused") == 1
    assert swarm.network.peer in str(caught.value)
