"""The lines of `serve`, in a terminal and elsewhere."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from llmnode.node.commands import serve
from llmnode.node.status_lines import Telling, continues

LINES = [
    "loading torch",
    "reading blocks [0, 30) of small",
    "read 3 of 30 blocks in 2 s",
    "read 30 of 30 blocks in 4 s",
]


def shown(terminal: bool, lines: list[str]) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with Telling(console) as telling:
        for line in lines:
            telling.tell(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_in_a_terminal_the_last_of_what_continues_stands() -> None:
    lines = shown(True, LINES).splitlines()
    standing = [line[line.index("llmnode: ") :] for line in lines if "llmnode: " in line]
    assert standing == [f"llmnode: {LINES[which]}" for which in (0, 1, 3)]


def test_nothing_that_is_said_steers_the_terminal() -> None:
    said = shown(True, ["reading blocks of \x1b[41m[red]small"])
    assert r"llmnode: reading blocks of \x1b[41m[red]small" in said


def test_elsewhere_all_lines_stand_and_nothing_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(False, LINES) == ""
    with Telling(None) as telling:
        for line in LINES:
            telling.tell(line)
    assert capsys.readouterr().err.splitlines() == [f"llmnode: {line}" for line in LINES] * 2


def test_what_comes_when_it_serves_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with Telling(console) as telling:
        telling.tell(LINES[0])
        telling.stop()
        telling.tell(LINES[2])
    assert capsys.readouterr().err == f"llmnode: {LINES[2]}\n"


@pytest.mark.parametrize(
    ("before", "text", "is_so"),
    [
        (LINES[2], LINES[3], True),
        ("still at it after 30 s", "still at it after 60 s", True),
        (LINES[1], LINES[2], False),
        ("", LINES[0], False),
    ],
)
def test_what_begins_alike_continues(before: str, text: str, is_so: bool) -> None:
    assert continues(before, text) == is_so


@pytest.mark.parametrize("addresses", [[], ["/ip4/127.0.0.1/tcp/4001"], ["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/2"]])
def test_new_addresses_are_told_in_the_same_words_to_programs(
    addresses: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    serve._addresses(addresses)
    serve._addresses_json(addresses)
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert said.err == f"llmnode: {told['text']}\n"
    assert told["addresses"] == addresses and all(each in told["text"] for each in addresses)
