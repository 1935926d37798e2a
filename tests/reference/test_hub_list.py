"""`llmnode adapters --hub`: what the hub has for a base, by the tags of its authors.

The hub is one on loopback (`reference/hub.py`), and huggingface_hub the real one.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock

from llmnode.errors import ConfigError
from llmnode.models.sources import hub_list
from llmnode.node.cli import main
from llmnode.node.commands import adapters
from reference.hub import NAME, Repository, the_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reference.hub import Hub

pytestmark = pytest.mark.reference

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
COMMIT, OF_BASE = "c" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a base, two adapters for it, and one for another base."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as a command sets it for its libraries
    with the_hub(tmp_path, monkeypatch) as hub:
        of_base = [f"base_model:adapter:{NAME}", "text-generation", f"base_model_revision:{OF_BASE}"]
        hub.repositories |= {
            NAME: Repository({}),
            "me/rare": _tagged(of_base[:1], downloads=1),
            "me/pirate": _tagged(of_base, commit=COMMIT, downloads=7),
            "me/other": _tagged(["base_model:adapter:org/other"], downloads=9),
        }
        yield hub


def _tagged(tags: list[str], **options: Any) -> Repository:
    return Repository({"README.md": f"---\ntags: {json.dumps(tags)}\n---\n# A card".encode()}, **options)


def _output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Stdout, and stderr in one line, of `llmnode adapters` with these arguments."""
    main(["adapters", *arguments])
    out, err = capsys.readouterr()
    return out, " ".join(err.split())


def test_it_lists_the_adapters_of_the_base_with_their_versions(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(_output(capsys, "--hub", NAME, "--json")[0])
    pirate = {
        "name": "me/pirate",
        "revision": COMMIT,
        "updated": "2026-01-31",
        "downloads": 7,
        "task": "text-generation",
        "base_revision": OF_BASE,
    }
    assert listed.keys() == {"hub"}, "without peers no swarm is asked"
    assert listed["hub"]["base"] == NAME
    assert listed["hub"]["adapters"][0] == pirate
    assert [each["name"] for each in listed["hub"]["adapters"]] == ["me/pirate", "me/rare"]
    table = _output(capsys, "--hub", f"hub:{NAME}")[0]
    assert "me/pirate" in table
    assert "me/other" not in table
    assert COMMIT[:12] in table
    assert "Their authors claim this" in table
    assert "no adapter whose card names org/none" in _output(capsys, "--hub", "org/none")[0]


def test_beside_the_swarm_it_lists_both(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nobody(_way_in: object) -> list[object]:
        return []

    monkeypatch.setattr(adapters, "_ask", nobody)
    listed = json.loads(_output(capsys, "--hub", NAME, "--peers", PEER, "--json")[0])
    assert listed["adapters"] == []
    assert len(listed["hub"]["adapters"]) == 2
    both = _output(capsys, "--hub", NAME, "--peers", PEER)[0]
    assert "no server announces" in both
    assert "me/rare" in both


def test_no_more_than_a_table_holds_are_asked_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapters, "MOST_SHOWN", 1)
    table = " ".join(_output(capsys, "--hub", NAME)[0].split())
    assert "me/pirate" in table
    assert "me/rare" not in table
    assert "there may be more: " in table
    assert "limit=1&" in f"{hub.asked[-1].query}&"


def test_the_versions_of_an_adapter_are_listed_the_newest_first(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/pirate"].titles = ("Trained \x1b[2Jlonger", "[bold]First")
    versions = json.loads(_output(capsys, "--versions", "me/pirate", "--json")[0])["versions"]
    assert versions["adapter"] == "me/pirate"
    newest, first = versions["commits"]
    assert newest == {"revision": COMMIT, "made": "2026-01-31", "title": "Trained \x1b[2Jlonger"}
    table = _output(capsys, "--versions", "hub:me/pirate")[0]
    assert table.index(COMMIT) < table.index(first["revision"])
    assert "\x1b" not in table
    assert "[bold]First" in table
    assert "--adapter me/pirate@COMMIT" in table
    assert "me/rare" not in table
    monkeypatch.setattr(adapters, "MOST_SHOWN", 1)
    assert len(json.loads(_output(capsys, "--versions", "me/pirate", "--json")[0])["versions"]["commits"]) == 1
    assert "the hub has no model me/none" in _output(capsys, "--versions", "me/none")[1]
    hub.listing = [{"id": COMMIT}]
    assert "does not list commits as a hub does: check HF_ENDPOINT" in _output(capsys, "--versions", "me/pirate")[1]


def test_names_of_strangers_do_not_steer_the_terminal(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.listing = [{"id": "me/\x1b[2J\u202eevil", "tags": [f"base_model_revision:\x1b[{7}m"], "sha": "[bold]\x07"}]
    table = _output(capsys, "--hub", NAME)[0]
    assert not {"\x1b", "\u202e", "\x07"} & set(table)
    assert "me/\\x1b[2J\\u202eevil" in table
    assert "[bold]" in table
    assert not {"\x1b", "\u202e"} & set(_output(capsys, "--hub", NAME, "--json")[0])


@pytest.mark.parametrize(
    "listing",
    [["me/pirate"], [{"sha": COMMIT}], [{"id": "me/pirate", "lastModified": "never"}], [{"id": "x", "tags": 3}], 5],
    ids=["names", "no name", "no date", "no tags", "a number"],
)
def test_an_answer_of_another_kind_is_told(hub: Hub, listing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hub.listing = listing
    assert "does not list models as a hub does: check HF_ENDPOINT" in _output(capsys, "--hub", NAME)[1]


def test_without_a_network_or_a_hub_it_says_so(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.status = 503
    assert f"the hub answered 503 when asked for the adapters of {NAME}" in _output(capsys, "--hub", NAME)[1]
    asked = len(hub.asked)
    monkeypatch.setenv("LLMNODE_OFFLINE", "1")
    assert "the network is switched off" in _output(capsys, "--hub", NAME)[1]
    assert "is no name of a model on the hub" in _output(capsys, "--hub", "pirate")[1]
    assert f"give --hub {NAME}" in _output(capsys, "--hub", f"{NAME}@v1")[1]
    assert "the network is switched off" in _output(capsys, "--versions", "me/pirate")[1]
    assert len(hub.asked) == asked


def test_a_hub_that_never_answers_is_left_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(hub_list, "adapters_on_hub", lambda *_arguments: answered.wait())
    try:
        with pytest.raises(ConfigError, match=r"has not listed adapters within 15 s"):
            trio.run(adapters._ask_hub, NAME, clock=MockClock(autojump_threshold=0))
    finally:
        answered.set()
