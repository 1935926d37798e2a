"""The files of the nodes that run on this machine: they come and go with their nodes, and tell no key."""

from __future__ import annotations

import json
import os
import stat
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.policy import JoinPolicy, LinkPolicy
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.node.forecasts import read_forecasts
from llmnode.swarm import own_nodes
from llmnode.swarm.former_peers import swarm_name
from llmnode.swarm.own_nodes import FOLDER, MOST_NODES, VERSION, NotedNode, note_running, running_nodes
from unit.hanging import hanging
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from pathlib import Path

KEY = b"k" * 32
CONTACT = "/ip4/203.0.113.7/tcp/4001/p2p/contact"
OLD_S = 3 * JoinPolicy().remember_every_s + 1


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / FOLDER


@in_trio
async def test_a_node_is_known_here_while_it_runs_and_to_those_of_its_swarm_alone(folder: Path) -> None:
    async with (
        open_network([LISTEN_ANY_LOOPBACK], LinkPolicy(), swarm_key=KEY) as private,
        open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as public,
        trio.open_nursery() as nursery,
    ):
        assert running_nodes(None) == running_nodes(KEY) == []
        await nursery.start(note_running, private, [CONTACT], KEY)
        await nursery.start(note_running, public, [], None)
        assert running_nodes(KEY) == [NotedNode(private.peer, [*private.addresses, CONTACT])]
        assert running_nodes(None) == [NotedNode(public.peer, list(public.addresses))]
        assert running_nodes(b"l" * 32) == []
        file = folder / f"{private.peer}.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert KEY.hex() not in file.read_text() and KEY.decode() not in file.read_text()
        nursery.cancel_scope.cancel()
    assert running_nodes(KEY) == running_nodes(None) == [] and not os.listdir(folder), "they are gone in order"


@in_trio
async def test_the_node_that_was_started_last_comes_first_and_a_killed_one_is_forgotten(folder: Path) -> None:
    async with (
        open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as first,
        open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as second,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(note_running, first, [], None)
        await nursery.start(note_running, second, [], None)
        assert [each.peer for each in running_nodes(None)] == [second.peer, first.peer]
        os.utime(folder / f"{first.peer}.json")  # as the first one does each minute
        assert [each.peer for each in running_nodes(None)] == [second.peer, first.peer]
        os.utime(folder / f"{second.peer}.json", 2 * (time.time() - OLD_S,))
        assert [each.peer for each in running_nodes(None)] == [first.peer]
        assert not (folder / f"{second.peer}.json").exists()
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_node_without_addresses_is_not_taken_for_one_that_its_user_has_named() -> None:
    async with open_network([], LinkPolicy()) as network, trio.open_nursery() as nursery:
        await nursery.start(note_running, network, [CONTACT], None)
        assert running_nodes(None) == [NotedNode(network.peer, [CONTACT])]
        assert list((await read_forecasts(None)).own) == [network.peer]
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_node_whose_cache_cannot_be_written_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "no folder"))
    caplog.set_level("INFO", "llmnode")
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network, trio.open_nursery() as nursery:
        await nursery.start(note_running, network, [], None)
        assert running_nodes(None) == []
        nursery.cancel_scope.cancel()
    assert "`llmnode invite` will not find this node" in caplog.text


@in_trio
async def test_a_disk_that_hangs_holds_up_neither_the_start_nor_the_end_of_a_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmnode")
    with hanging(monkeypatch, own_nodes, "write_in_cache") as hung:
        async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network, trio.open_nursery() as nursery:
            await nursery.start(note_running, network, [], None)
            nursery.cancel_scope.cancel()
        assert hung.count == 1, "it still hangs"
    assert "will not find this node: the cache has not answered" in caplog.text


FIELDS = ["version", "of", "s", "peer", "addresses"]
values = st.recursive(
    st.none() | st.floats() | st.integers() | st.just(10**400) | st.text(max_size=9) | st.just([CONTACT]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values, st.sampled_from(FIELDS))
def test_a_damaged_file_is_as_if_it_were_not_there(folder: Path, value: Any, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "damaged.json"
    whole = {"version": VERSION, "of": swarm_name(None), "s": 1.0, "peer": "own", "addresses": [CONTACT]}
    file.write_text(json.dumps(whole))
    assert running_nodes(None) == [NotedNode(PeerId("own"), [CONTACT])]
    file.write_text(json.dumps(value))
    assert running_nodes(None) == []
    file.write_text(json.dumps(whole | {name: value}))
    for each in running_nodes(None):
        assert isinstance(each.peer, str)
        assert all(isinstance(address, str) for address in each.addresses)
    del whole[name]
    file.write_text(json.dumps(whole))
    assert running_nodes(None) == []
    file.write_bytes(b"\xff{")
    assert running_nodes(None) == []


def test_a_node_that_ends_meanwhile_hides_no_other(folder: Path) -> None:
    """Its file is listed, and gone when it is looked at: a link that leads nowhere is the same to a reader."""
    folder.mkdir(parents=True)
    whole = {"version": VERSION, "of": swarm_name(None), "s": 1.0, "peer": "own", "addresses": [CONTACT]}
    for name in ("a", "z"):
        (folder / f"{name}.json").symlink_to(folder / "gone")
    (folder / "own.json").write_text(json.dumps(whole))
    assert running_nodes(None) == [NotedNode(PeerId("own"), [CONTACT])]


def test_the_number_of_files_has_a_limit(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(MOST_NODES + 5):
        (folder / f"{number}.json").write_text("{}")
    running_nodes(None)
    assert len(list(folder.iterdir())) == MOST_NODES
