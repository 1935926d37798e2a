"""Commands without peers, and servers, where mDNS cannot help or is not asked; when a server is told of.

Where it does help is tested in `tests/netns`.
"""

from __future__ import annotations

import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import llmnode
from llmnode.client.connect import with_nearby
from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.policy import MdnsPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.invite import Invite
from llmnode.net.mdns import PORT, LocalNetwork
from llmnode.net.mdns_messages import Heard
from llmnode.net.swarm_key import entry, make_key
from llmnode.node import Node, nearby
from llmnode.node.nearby import find_swarm, living_nearby
from llmnode.swarm import found_nearby
from llmnode.swarm.found_nearby import describe
from llmnode.testing.exact_blocks import EXACT_MODEL
from unit.exact_nodes import ExactLoader
from unit.in_trio import DEADLINE_S, in_trio
from unit.mdns_in_memory import HERE, POLICY, Datagrams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from llmnode.node.running_node import RunningNode
    from llmnode.ports import Loaded


def a_network() -> list[LocalNetwork]:
    return [LocalNetwork("10.0.0.1", IPv4Network("10.0.0.0/8"), 2)]


def failed(report: Callable[[str], None] = lambda _line: None) -> str:
    with pytest.raises(ConfigError) as raised:
        find_swarm(report)
    return str(raised.value)


def test_a_machine_without_a_private_network_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_nearby, "local_networks", list)
    lines: list[str] = []
    assert "in no private network" in failed(lines.append) and not lines


def test_a_port_that_another_program_keeps_for_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_nearby, "local_networks", a_network)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        try:
            other.bind(("", PORT))
        except OSError:
            pytest.skip("this machine has a program for mDNS, which shares its port")
        said = failed()
    assert "mDNS does not work here (Address already in use)" in said and "--peers ADDRESS" in said


def test_a_line_tells_few_models_and_few_spans_of_each() -> None:
    def offer(model: str, start: int) -> Announcement:
        profile = EXACT_MODEL.profile
        of = Offer(model, profile, 500, Span(start, start + 1), PeerState.ONLINE, 1, 1, 1)
        return Announcement(PeerId(f"peer{start}"), (), 0, 1, "llmnode", of)

    assert describe([offer("a", 1), offer("a", 0)]) == "2 servers of a (blocks [0, 1), [1, 2))"
    crowd = describe([offer("a", start) for start in range(400)])
    assert crowd.startswith("400 servers of a (blocks [0, 1), ") and crowd.endswith(", [7, 8) and 392 other spans)")
    assert describe([offer(f"m{number}", 0) for number in range(9)]).endswith(" and 4 other models")


@pytest.fixture
def mdns(monkeypatch: pytest.MonkeyPatch) -> Datagrams:
    """The datagrams of all that uses mDNS."""
    datagrams = Datagrams()

    @asynccontextmanager
    async def open_datagrams(_policy: MdnsPolicy | None = None) -> AsyncIterator[Datagrams]:
        yield datagrams

    for module in (nearby, found_nearby):
        monkeypatch.setattr(module, "open_mdns", open_datagrams)
        monkeypatch.setattr(module, "local_networks", list)
    return datagrams


def test_a_command_without_peers_finds_strangers_and_says_so(mdns: Datagrams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_nearby, "local_networks", a_network)
    lines: list[str] = []
    with Node(worker="thread", make_loader=ExactLoader) as node:
        addresses = tuple(node.addresses)
        mdns.say.send_nowait(Heard(HERE, False, {node.running.peer: addresses}))
        found = find_swarm(lines.append)
    assert found == entry(found) == Invite(addresses, is_near=True)
    (line,) = [each for each in lines if each.startswith("found by mDNS: 1 server of exact (blocks [0, 6))")]
    assert "anybody in this network may run one" in line and "can read text" in line


def test_a_program_that_names_no_peers_finds_strangers_and_is_warned(
    mdns: Datagrams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(found_nearby, "local_networks", a_network)
    with Node(worker="thread", make_loader=ExactLoader) as node:
        addresses = tuple(node.addresses)
        mdns.say.send_nowait(Heard(HERE, False, {node.running.peer: addresses}))
        found = trio.run(with_nearby, Invite((), model="org/name"))
    assert found == Invite(addresses, model="org/name", is_near=True)
    assert "can read text" in caplog.messages[-1]


@pytest.mark.parametrize("peers", [[], "", Invite(())], ids=["none", "empty", "an invite without peers"])
def test_peers_that_are_given_and_are_none_are_not_looked_for(mdns: Datagrams, peers: Any) -> None:
    """A program whose list of peers is empty by mistake is not to give its text to strangers."""
    with pytest.raises(ConfigError):
        llmnode.connect(peers=peers)
    assert not mdns.asked_s


@in_trio
async def test_a_server_is_told_of_when_its_blocks_are_loaded_and_one_of_a_private_swarm_never(
    mdns: Datagrams, tmp_path: Path
) -> None:
    answers_at_load: list[int] = []

    class Loader(ExactLoader):
        def load(self, span: Span) -> Loaded:
            answers_at_load.append(len(mdns.answers))
            return super().load(span)

    here = [LISTEN_ANY_LOOPBACK]
    serving: dict[str, Any] = {"worker": "thread", "make_loader": Loader, "mdns": True, "listen": here}
    key = tmp_path / "swarm.key"
    make_key(key)
    async with Node(swarm_key=key, **serving):
        await trio.testing.wait_all_tasks_blocked()
    assert not mdns.answers and not mdns.asked_s
    async with Node(**serving):
        await mdns.answered.wait()
    assert answers_at_load == [0, 0]


class Lan:
    """A network of `Datagrams`: each hears what the others ask and answer."""

    def __init__(self) -> None:
        self._members: list[Datagrams] = []

    @asynccontextmanager
    async def open(self, _policy: MdnsPolicy | None = None) -> AsyncIterator[Datagrams]:
        member = LanMember(self)
        self._members.append(member)
        yield member
        self._members.remove(member)

    def tell(self, sender: Datagrams, message: Heard) -> None:
        for each in self._members:
            if each is not sender:
                each.say.send_nowait(message)


class LanMember(Datagrams):
    def __init__(self, lan: Lan) -> None:
        super().__init__()
        self.policy = replace(POLICY, find_s=0.1)
        self._lan = lan

    async def ask(self) -> None:
        self._lan.tell(self, Heard(HERE, True, {}))

    async def answer(self, listening: Sequence[str], lifetime_s: int | None = None) -> None:
        if lifetime_s is None:
            self._lan.tell(self, Heard(HERE, False, {listening[0].rpartition("/")[2]: tuple(listening)}))


@in_trio
async def test_two_servers_that_start_together_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "open_mdns", Lan().open)
    monkeypatch.setattr(nearby, "local_networks", a_network)
    both_load = threading.Barrier(2)

    class Loader(ExactLoader):
        def load(self, span: Span) -> Loaded:
            both_load.wait(DEADLINE_S)
            return super().load(span)

    began_s = trio.current_time()

    async def serve(*, task_status: trio.TaskStatus[RunningNode]) -> None:
        here = [LISTEN_ANY_LOOPBACK]
        async with Node(worker="thread", make_loader=Loader, mdns=True, listen=here) as node:
            task_status.started(node.running)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nodes: list[RunningNode] = []

        async def start() -> None:
            nodes.append(await nursery.start(serve))

        async with trio.open_nursery() as starting:
            starting.start_soon(start)
            starting.start_soon(start)
        one, other = nodes
        for node, peer in ((one, other.peer), (other, one.peer)):
            while peer not in node.swarm.view:
                await node.swarm.wait_changed()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began_s < POLICY.look_every_s / 2, "not at the next look alone"


@in_trio
async def test_a_node_where_mdns_does_not_work_runs_on_and_its_errors_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @asynccontextmanager
    async def fail(_policy: MdnsPolicy | None = None) -> AsyncIterator[Datagrams]:
        raise OSError(98, "Address already in use")
        yield

    monkeypatch.setattr(nearby, "open_mdns", fail)
    lines: list[str] = []
    unused: Any = None
    with pytest.raises(ValueError, match="later") as raised:
        async with living_nearby(unused, unused, lines.append, looks=True, serves=trio.Event()):
            raise ValueError("later")
    assert raised.value.__context__ is None
    assert lines == ["mDNS does not work here (Address already in use): other machines need --peers to find this node"]
