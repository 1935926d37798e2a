"""Answers of a peer on their way to the task that asked, and its words on their way into an error."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from llmnode.core.ids import Epoch, PeerId, SessionId, Step
from llmnode.core.links import unasked
from llmnode.core.links.uplink import SHARE_BYTES_PER_S
from llmnode.errors import PeerError, PeerFull, PeerRefused, PeerTimeout, PeerUnreachable, RemoteProtocolError
from llmnode.swarm.expected import read_answer
from llmnode.swarm.peer_connection import TAKES_WITHIN_S, PeerConnection, open_connection
from llmnode.swarm.uploads import Uploads
from llmnode.testing import open_internet, simulated
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, RefusalCode, pack, unpack
from llmnode.wire.push_messages import PushLimit
from llmnode.wire.refusal import farewell_of_full, refusal_of
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from llmnode.wire.frame import Buffer


@in_trio
async def test_an_answer_that_came_after_the_question_was_given_up_is_not_read() -> None:
    link = cast("Any", SimpleNamespace(peer="12D3KooW", wait_written=None))
    connection = PeerConnection(link, Uploads(), lambda _: None)
    with connection.expect(SessionId(bytes(16)), Epoch(0), Step(0)) as answer:
        answer.arrive(Frame(FrameType.REFUSAL))
        with trio.CancelScope() as given_up:
            given_up.cancel()
            await answer.receive(FrameType.RESULT, 1.0)
        assert given_up.cancelled_caught


@pytest.mark.parametrize("second_comes_first", [True, False])
@in_trio
async def test_a_second_result_of_one_step_is_no_answer_to_what_is_asked_next(second_comes_first: bool) -> None:
    link = cast("Any", SimpleNamespace(peer="12D3KooW", wait_written=None))
    connection = PeerConnection(link, Uploads(), lambda _: None)
    result, replayed = Frame(FrameType.RESULT), Frame(FrameType.REPLAYED)
    with connection.expect(SessionId(bytes(16)), Epoch(0), Step(0)) as answer:
        answer.arrive(result)
        assert await answer.receive(FrameType.RESULT, 1.0) is result
        for each in (result, replayed) if second_comes_first else (replayed, result):
            answer.arrive(each)
        assert await answer.receive(FrameType.REPLAYED, 1.0) is replayed


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, PeerTimeout),
        (refusal_of(Frame(FrameType.OPEN), RefusalCode.BUSY, "no memory"), PeerRefused),
        (Frame(FrameType.NEWS), RemoteProtocolError),
    ],
)
@simulated
async def test_an_error_says_how_long_the_peer_was_waited_for(answer: Frame | None, error: type[PeerError]) -> None:
    link = cast("Any", SimpleNamespace(peer="12D3KooW", wait_written=None))
    connection = PeerConnection(link, Uploads(), lambda _: None)

    async def answer_later() -> None:
        if answer is not None:
            await trio.sleep(15)
            expected.arrive(answer)

    with connection.expect(SessionId(bytes(16)), Epoch(0), Step(0)) as expected:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_later)
            with pytest.raises(error) as raised:
                await expected.receive(FrameType.OPENED, 16.0)
    assert raised.value.waited_s == pytest.approx(16.0 if answer is None else 15.0)


@pytest.mark.parametrize(("answers", "uplink_s"), [(0, 0), (3, 0), (0, 100), (1, 100)])
@simulated
async def test_a_peer_that_takes_nothing_more_is_waited_for_from_its_latest_answer_on(
    answers: int, uplink_s: int
) -> None:
    """It may read so slowly that steps of other sessions wait for hours. One that answers computes what it has.

    A large frame may take `uplink_s` on our side, which is not the peer's fault.
    """
    session, again_s = SessionId(b"s" * 16), TAKES_WITHIN_S - 10
    say, hear = trio.open_memory_channel[Frame](1)

    async def send(_frame: Frame) -> None:
        await trio.sleep_forever()

    async def answer() -> None:
        for step in range(answers):
            await trio.sleep(again_s)
            await say.send(Frame(FrameType.RESULT, session, step=Step(step)))

    large = Frame(FrameType.STEP, SessionId(b"o" * 16), payload=bytes(uplink_s * SHARE_BYTES_PER_S))
    moving = {"is_full": True, "send": send, "receive": hear.receive}
    link = cast("Any", SimpleNamespace(peer="12D3KooW", wait_written=None, **moving))
    connection = PeerConnection(link, Uploads(), lambda _: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        nursery.start_soon(answer)
        began_s = trio.current_time()
        with ExitStack() as stack, trio.fail_after(1000):
            for step in range(answers):
                stack.enter_context(connection.expect(session, Epoch(0), Step(step)))
            with pytest.raises(PeerTimeout) as raised:
                await connection.tell(large)
        nursery.cancel_scope.cancel()
    assert raised.value.peer == "12D3KooW"
    waited_s = trio.current_time() - began_s
    expected_s = pytest.approx(answers * again_s + TAKES_WITHIN_S + uplink_s, abs=0.01)
    assert waited_s == expected_s == raised.value.waited_s


@simulated
async def test_words_about_a_session_that_cannot_be_read_end_the_connection_and_the_error_names_the_peer() -> None:
    session = SessionId(b"s" * 16)
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        async with open_connection(await client.dial(server.addresses[0])) as connection, server.accept() as link:
            connection.listen(session, lambda frame: unread(frame.meta), lambda: None)
            await link.send(Frame(FrameType.GRANT, session, meta=b"no limit"))
            await connection.wait_ended()
            with pytest.raises(RemoteProtocolError) as asked:
                connection.expect(session, Epoch(0), Step(0))
            assert {connection.error.peer, asked.value.peer} == {server.peer}


@pytest.mark.parametrize("says", ["full", "full, and more", "busy with a question"])
@simulated
async def test_a_peer_is_full_if_it_says_so_in_the_last_frame_of_the_link(says: str) -> None:
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        async with open_connection(await client.dial(server.addresses[0])) as connection, server.accept() as link:
            if says == "busy with a question":
                await link.send(refusal_of(Frame(FrameType.NEWS, step=Step(1)), RefusalCode.BUSY, "no memory"))
            else:
                await link.send(farewell_of_full())
            if says == "full, and more":
                await link.send(Frame(FrameType.NEWS))
            await trio.sleep(1)
            assert not connection.has_ended
            await link.end("others need its place")
            await connection.wait_ended()
            assert isinstance(connection.error, PeerFull) is (says == "full")
            assert connection.error.peer == server.peer


GRANT = Frame(FrameType.GRANT, SessionId(b"s" * 16))


@pytest.mark.parametrize("kind", ["unasked", "about a session", "answered again", "a result again"])
@simulated
async def test_a_peer_that_sends_without_end_what_nobody_waits_for_loses_its_link(kind: str) -> None:
    """A server connects to peers that strangers announce, and these may send a million frames a minute."""
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        async with open_connection(await client.dial(server.addresses[0])) as connection, server.accept() as link:
            if kind == "about a session":
                connection.listen(GRANT.session, lambda _frame: None, lambda: None)
            frame, sent = GRANT, 0
            if "again" in kind:
                answer = connection.expect(GRANT.session, GRANT.epoch, GRANT.step)
            if kind == "a result again":
                frame = Frame(FrameType.RESULT, GRANT.session)
                await link.send(frame)
                await answer.receive(FrameType.RESULT, 1.0)
            with suppress(PeerUnreachable):
                while sent < 10 * unasked.BURST:
                    await link.send(frame)
                    sent += 1
            assert unasked.BURST <= sent < 2 * unasked.BURST
            await connection.wait_ended()
            assert isinstance(connection.error, RemoteProtocolError)


@simulated
async def test_a_peer_may_send_some_frames_for_each_of_ours_and_a_few_whenever_it_likes() -> None:
    """Grants come for pushes, and late answers for questions that were given up."""
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        async with open_connection(await client.dial(server.addresses[0])) as connection, server.accept() as link:
            for _ in range(unasked.BURST):
                await connection.tell(Frame(FrameType.WANT, GRANT.session))
                await link.receive()
                for _ in range(unasked.EACH):
                    await link.send(GRANT)
            for _ in range(4):
                await trio.sleep(unasked.BURST / unasked.PER_S)
                for _ in range(unasked.BURST):
                    await link.send(GRANT)
            await trio.sleep(1)
            assert not connection.has_ended


@simulated
async def test_a_peer_that_we_tell_nothing_may_send_some_frames_for_each_answer_that_we_expect() -> None:
    """Steps are pushed to it, and it answers some twice."""
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        async with open_connection(await client.dial(server.addresses[0])) as connection, server.accept() as link:
            for number in range(unasked.BURST // 4):
                step = Step(number)
                with connection.expect(GRANT.session, Epoch(0), step) as answer:
                    for _ in range(1 + unasked.EACH):
                        await link.send(Frame(FrameType.RESULT, GRANT.session, step=step))
                    await answer.receive(FrameType.RESULT, 1.0)
                await trio.sleep(0.001)
            assert not connection.has_ended


def unread(meta: Buffer) -> None:
    unpack(PushLimit, meta)


def test_a_refusal_neither_steers_a_terminal_nor_ends_a_line_wherever_it_is_printed() -> None:
    words = "busy\x1b]52;c;eA==\x07\u202e\nllmnode: ready"
    answer = Frame(FrameType.REFUSAL, meta=pack(Refusal(words[:64], words, 2000)))
    with pytest.raises(PeerRefused) as refused:
        read_answer(answer, FrameType.OPENED, PeerId("12D3KooW"))
    assert str(refused.value).isprintable()
    assert refused.value.reason == "busy\\x1b]52;c;eA==\\x07\\u202e\\nllmnode: ready"
    assert refused.value.retry_after_s == 2
