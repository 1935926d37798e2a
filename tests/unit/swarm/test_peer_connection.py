"""Answers of a peer on their way to the task that asked, and its words on their way into an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.errors import PeerRefused
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, pack
from unit.in_trio import in_trio


@in_trio
async def test_an_answer_that_came_after_the_question_was_given_up_is_not_read() -> None:
    connection = PeerConnection(cast("Any", SimpleNamespace(peer="12D3KooW")))
    with connection.expect(SessionId(bytes(16)), Epoch(0), Step(0)) as answer:
        answer.arrive(Frame(FrameType.REFUSAL))
        with trio.CancelScope() as given_up:
            given_up.cancel()
            await answer.receive(FrameType.RESULT, 1.0)
        assert given_up.cancelled_caught


def test_a_refusal_neither_steers_a_terminal_nor_ends_a_line_wherever_it_is_printed() -> None:
    words = "busy\x1b]52;c;eA==\x07\u202e\nllmnode: ready"
    answer = Frame(FrameType.REFUSAL, meta=pack(Refusal(words[:64], words, 2000)))
    connection: Any = SimpleNamespace(peer="12D3KooW")
    with pytest.raises(PeerRefused) as refused:
        PeerConnection.checked(connection, answer, FrameType.OPENED)
    assert str(refused.value).isprintable()
    assert refused.value.reason == "busy\\x1b]52;c;eA==\\x07\\u202e\\nllmnode: ready"
    assert refused.value.retry_after_s == 2
