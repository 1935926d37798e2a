"""`llmnode demo` says in lines what its servers do where there is no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llmnode.core.span import Span
from llmnode.node.demo import ServerLines
from llmnode.node.processes import ENDED, READY, ServerProcess

if TYPE_CHECKING:
    import pytest
    import trio

NO_PROCESS = cast("trio.Process", None)
"""Nothing is asked of it."""


def test_each_state_of_a_server_is_told_once_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = servers = [ServerProcess(span, NO_PROCESS) for span in (Span(0, 15), Span(15, 30))]
    lines = ServerLines()
    lines.tell(servers)
    assert capsys.readouterr().err == "", "that they start is said before"
    first.state = "loading torch"
    lines.tell(servers)
    second.state = "loading torch"
    lines.tell(servers)
    first.state, first.peer = READY, "12D3KooWpeer"
    lines.tell(servers)
    first.state = second.state = ENDED
    lines.tell(servers)
    assert capsys.readouterr().err.splitlines() == [
        "llmnode: blocks [0, 15): loading torch",
        "llmnode: blocks [15, 30): loading torch",
        "llmnode: blocks [0, 15): ready, peer 12D3KooWpeer",
    ]
