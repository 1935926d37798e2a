"""A peer's words on their way into an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmnode.errors import PeerRefused
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, pack


def test_a_refusal_neither_steers_a_terminal_nor_ends_a_line_wherever_it_is_printed() -> None:
    words = "busy\x1b]52;c;eA==\x07\u202e\nllmnode: ready"
    answer = Frame(FrameType.REFUSAL, meta=pack(Refusal(words[:64], words, 2000)))
    connection: Any = SimpleNamespace(peer="12D3KooW")
    with pytest.raises(PeerRefused) as refused:
        PeerConnection.checked(connection, answer, FrameType.OPENED)
    assert str(refused.value).isprintable()
    assert refused.value.reason == "busy\\x1b]52;c;eA==\\x07\\u202e\\nllmnode: ready"
    assert refused.value.retry_after_s == 2
