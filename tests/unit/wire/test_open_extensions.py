"""The extensions of OPEN: how many positions come at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.errors import RemoteProtocolError
from llmnode.wire.messages import OpenRequest
from llmnode.wire.open_extensions import open_extensions, positions_at_once

REQUEST = OpenRequest(bytes(32), 0, 1, 100, "float32", "raw", "interactive", keep_outputs=True)


@pytest.mark.parametrize("at_once", [0, 1, 100])
def test_a_server_reads_how_many_positions_come_at_once(at_once: int) -> None:
    prompts = DeepPrompts(1, 1, 2, bytes(8))
    for each in (NO_PROMPTS, prompts):
        assert positions_at_once(replace(REQUEST, extensions=open_extensions(each, at_once))) == at_once


def test_a_session_without_any_has_no_extensions() -> None:
    assert open_extensions(NO_PROMPTS, 0) is None


@pytest.mark.parametrize("said", [-1, 101, True, 1.0, "1", None, [1]])
def test_positions_that_cannot_be_are_refused(said: object) -> None:
    with pytest.raises(RemoteProtocolError, match="positions at once, of 100"):
        positions_at_once(replace(REQUEST, extensions={"positions": said}))
