"""`--only-peers` and `--not-peers`: a client's sessions go through the servers that its user permits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.core.span import Span
from process import in_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def twins(start_servers: Callable[..., list[Any]]) -> list[Any]:
    """Two servers of all blocks, the second of which knows the first."""
    (first,) = start_servers([Span(0, 30)])
    return [first, *start_servers([Span(0, 30)], peers=[first.address])]


def servers_of(twins: list[Any], file: Path, *options: str) -> set[str]:
    """The servers that signed for a text."""
    command = ["generate", "--peers", twins[0].address, "--max-new-tokens", "2", "--receipts", str(file), *options]
    done = in_process.llmnode(*command)
    assert done.returncode == 0, done.stderr
    parts = json.loads(in_process.llmnode("verify", str(file), "--json").stdout)["parts"]
    return {part["peer"] for part in parts}


@pytest.mark.parametrize("denied", [0, 1])
def test_a_route_avoids_a_server_that_is_denied_and_keeps_to_those_that_are_permitted(
    twins: list[Any], tmp_path: Path, denied: int
) -> None:
    peers = [each.ready["peer"] for each in twins]
    # Each is denied in turn, so that no accident decides.
    assert servers_of(twins, tmp_path / "without", "--not-peers", peers[denied]) == {peers[1 - denied]}
    assert servers_of(twins, tmp_path / "only", "--only-peers", twins[1 - denied].address) == {peers[1 - denied]}


def test_without_a_permitted_server_the_user_is_told_why(twins: list[Any]) -> None:
    denied = [each.ready["peer"] for each in twins]
    done = in_process.llmnode("generate", "--peers", twins[0].address, "--not-peers", *denied)
    assert done.returncode == 1
    assert "This client was told to leave out some servers" in done.stderr
