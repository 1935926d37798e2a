"""The client of a pass says how long it waits, in an extension that older servers ignore."""

from __future__ import annotations

import pytest

from llmnode.errors import RemoteProtocolError
from llmnode.wire.messages import DEADLINE_MS, EXTENSIONS, pack, unpack
from llmnode.wire.pass_deadline import deadline_extension, deadline_s
from llmnode.wire.pass_messages import Pass


def asked(extensions: dict[str, object] | None) -> Pass:
    message = Pass(bytes(32), 0, 1, "float32", "raw", "training", [1], extensions=extensions)
    return unpack(Pass, pack(message))


@pytest.mark.parametrize("timeout_s", [0.001, 1.5, 900.0])
def test_a_deadline_comes_as_it_was_said(timeout_s: float) -> None:
    assert deadline_s(asked(deadline_extension(timeout_s))) == timeout_s
    assert DEADLINE_MS in EXTENSIONS[Pass]


def test_a_deadline_is_at_least_a_millisecond() -> None:
    assert deadline_s(asked(deadline_extension(1e-9))) == 0.001


@pytest.mark.parametrize("extensions", [None, {}, {"another": [1]}], ids=str)
def test_a_pass_may_have_none(extensions: dict[str, object] | None) -> None:
    assert deadline_s(asked(extensions)) is None


@pytest.mark.parametrize("value", [0, -1, 2**32, 1.5, "1", True, [], {}], ids=repr)
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="deadline_ms"):
        deadline_s(asked({DEADLINE_MS: value}))
