"""`llmnode invite` without peers: which ones it finds, which model it names, and what it says."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from argparse import Namespace
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.dial_gate import scope_of
from llmnode.core.peers.invited import DialledFrom, widest
from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.net import listeners
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, own_ips
from llmnode.net.invite import Invite, read_invite, write_invite
from llmnode.net.swarm_key import make_key
from llmnode.node import inviting
from llmnode.node.app import open_relay
from llmnode.node.cli import main
from llmnode.node.commands import relay
from llmnode.node.commands.invite import IN_FILE, _model_of
from llmnode.node.commands.joining import check_peers, private_invite, warning_of_reach
from llmnode.node.inviting import FORMER, HERE, NEARBY, Found, ServedModel
from llmnode.node.settings import NO_OPTIONS
from llmnode.swarm import former_peers
from llmnode.swarm.former_peers import FormerPeers
from llmnode.swarm.own_nodes import note_running
from unit.exact_nodes import exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llmnode.net.host import Libp2pNetwork
    from llmnode.node.running_node import RunningNode

PEER = "/ip4/{}/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
EXACT = (ServedModel("exact", None),)
OUR_EXACT = (ServedModel("exact", None, is_ours=True),)
ONE, OTHER = ServedModel("org/one", "org/one@" + "a" * 40), ServedModel("org/other", "org/other@" + "b" * 40)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LLMNODE_") and name not in NO_OPTIONS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLMNODE_CONFIG", os.devnull)
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))


@asynccontextmanager
async def noted(network: Libp2pNetwork, key: bytes | None = None) -> AsyncIterator[None]:
    """The network is noted while this lasts, as `serve` and `relay` note theirs."""
    async with trio.open_nursery() as nursery:
        await nursery.start(note_running, network, [], key)
        yield
        nursery.cancel_scope.cancel()


async def until_online(node: RunningNode) -> None:
    while node.role.offer().state is not PeerState.ONLINE:
        await node.swarm.wait_changed()


@in_trio
async def test_a_server_on_this_machine_is_found_and_named_with_its_swarm() -> None:
    lines: list[str] = []
    async with exact_node(blocks="0:3") as first, exact_node(blocks="3:6", peers=first.addresses) as second:
        await until_online(second)
        async with noted(second.network):
            found = await inviting._find(None, lines.append, mdns=False)
        peers = (*second.addresses, *first.addresses)
        assert found == Found(peers, OUR_EXACT, DialledFrom.MACHINE), "the own one first"
        assert await inviting._find(None, lines.append, mdns=False) is None
    assert lines == [f"found {HERE}: 2 servers of exact (blocks [0, 3), [3, 6))"]


@in_trio
async def test_a_node_is_found_on_its_own_machine_though_that_cannot_dial_what_it_announces() -> None:
    """A router without hairpin NAT does not lead from inside to its own address of the internet."""
    announced, way_in, lines = "/ip4/11.22.0.1/tcp/4001", Invite(()), list[str]()
    async with open_relay([LISTEN_ANY_LOOPBACK], [announced], way_in, None) as network, noted(network):
        found = await inviting._find(None, lines.append, mdns=False)
        assert found == Found((f"{announced}/p2p/{network.peer}",), (), DialledFrom.INTERNET)


@in_trio
async def test_two_nodes_of_this_machine_in_one_swarm_are_told_in_one_line() -> None:
    lines: list[str] = []
    async with exact_node(blocks="0:3") as first, exact_node(blocks="3:6", peers=first.addresses) as second:
        for node in (first, second):
            while len(node.swarm.view.announcements()) < 2:
                await node.swarm.wait_changed()
            await until_online(node)
        async with noted(first.network), noted(second.network):
            assert await inviting._find(None, lines.append, mdns=False)
    assert lines == [f"found {HERE}: 2 servers of exact (blocks [0, 3), [3, 6))"]


@in_trio
async def test_a_relay_of_a_private_swarm_is_found_by_its_key_alone(tmp_path: Path) -> None:
    key, lines = make_key(tmp_path / "swarm.key"), list[str]()
    async with open_relay([LISTEN_ANY_LOOPBACK], [], Invite((), key), None) as network, noted(network, key):
        found = await inviting._find(key, lines.append, mdns=True)
        assert found == Found(tuple(network.addresses), (), DialledFrom.MACHINE)
        assert await inviting._find(None, lines.append, mdns=False) is None
        assert await inviting._find(b"another".ljust(32), lines.append, mdns=True) is None, "and no mDNS is used"
    assert lines == [f"found {HERE}: 1 peer, and no server that answers"]


@in_trio
async def test_peers_of_a_former_run_are_found_by_the_key_and_dead_ones_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(former_peers, "_MACHINE", "no machine")  # else what is on loopback is not remembered
    lines: list[str] = []
    dead = ["/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"]
    async with exact_node() as server:
        await until_online(server)
        now_s = time.time()
        FormerPeers([PEER.format("127.0.0.1")], None).write([dead, list(server.addresses)], now_s - 60)
        FormerPeers([PEER.format("127.0.0.1") + "x"], None).write([dead], now_s)
        FormerPeers([PEER.format("127.0.0.1")], b"k" * 32).write([dead], now_s)
        found = await inviting._find(None, lines.append, mdns=False)
        assert found == Found(tuple(server.addresses), EXACT, DialledFrom.MACHINE)
        assert await inviting._find(b"k" * 32, lines.append, mdns=False) is None, "another swarm"
    assert lines == [f"found {FORMER}: 1 server of exact (blocks [0, 6))"]


@in_trio
async def test_a_malformed_address_among_those_of_former_runs_hides_no_other_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(former_peers, "_MACHINE", "no machine")  # else what is on loopback is not remembered
    malformed = [f"/ip4/127.0.0.1/tcp/99999/p2p/{PEER.rpartition('/')[2]}", "/ip4/127.0.0.1/banana/p2p/nobody"]
    async with exact_node() as server:
        await until_online(server)
        addresses = [f"/ip4/127.0.0.1/udp/1/p2p/{server.peer}", *server.addresses]
        FormerPeers([PEER.format("127.0.0.1")], None).write([*([each] for each in malformed), addresses], time.time())
        found = await inviting._find(None, lambda _: None, mdns=False)
        assert found == Found(tuple(server.addresses), EXACT, DialledFrom.MACHINE)


@in_trio
async def test_peers_that_others_can_dial_go_before_a_server_of_this_machine_alone() -> None:
    usable = (str(each) for each in own_ips() if each.version == 4)
    lan = next((each for each in usable if scope_of(each) not in (None, "machine", "link")), None)
    if lan is None:
        pytest.skip("this machine has no address but those of its loopback")
    lines, key = list[str](), b"k" * 32
    private = partial(exact_node, swarm_key=Invite((), key))
    async with private() as own, private(listen=[f"/ip4/{lan}/tcp/0"]) as other, noted(own.network, key):
        await until_online(other)
        FormerPeers([PEER.format(lan)], key).write([other.addresses], time.time())
        found = await inviting._find(key, lines.append, mdns=False)
        assert found == Found(tuple(other.addresses), EXACT, DialledFrom.NETWORK)
        async with noted(other.network, key):
            assert await inviting._find(key, lines.append, mdns=False) == replace(found, models=OUR_EXACT)
    assert [line.partition(":")[0] for line in lines] == [f"found {HERE}", f"found {FORMER}", f"found {HERE}"]


@in_trio
async def test_with_a_public_swarm_of_this_machine_alone_no_swarm_of_others_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def looked(*_: object) -> NoReturn:
        pytest.fail("the user runs a swarm here: an invite to another one would lead people to strangers")

    monkeypatch.setattr(inviting, "_nearby", looked)
    monkeypatch.setattr(inviting, "_former", looked)
    async with exact_node() as own, noted(own.network):
        await until_online(own)
        found = await inviting._find(None, lambda _: None, mdns=True)
        assert found == Found(tuple(own.addresses), OUR_EXACT, DialledFrom.MACHINE)


@in_trio
async def test_a_stranger_is_named_where_it_answered_before_all_that_it_announces() -> None:
    claims = [f"/ip4/8.8.{number}.8/tcp/4001" for number in range(4)]
    async with exact_node(announce=claims) as stranger:
        await until_online(stranger)
        (real,), announces = stranger.listening, tuple(stranger.addresses)
        way = inviting._Way(NEARBY, [[real]], is_near=True)
        found = await inviting._try(way, None, lambda _: None)
        assert found is not None and found.peers == (real, *announces)
        assert found.reach is DialledFrom.MACHINE, "the rest is only claimed"


def test_silent_peers_are_told_of_and_given_up_in_time_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would take 10 s. When one is dialled, the clock jumps by that time."""
    clock, lines, dialled = trio.testing.MockClock(rate=1.0), list[str](), list[trio.SocketStream]()
    key = b"k" * 32

    async def take(stream: trio.SocketStream) -> None:
        dialled.append(stream)
        clock.jump(LinkPolicy().dial_timeout_s + 1.0)

    async def main() -> None:
        node = exact_node(swarm_key=Invite((), key))
        async with trio.open_nursery() as nursery, node as own, noted(own.network, key):
            await until_online(own)
            swarms: list[list[list[str]]] = []
            for number in range(inviting.MOST_FORMER_SWARMS):
                (silent,) = await nursery.start(partial(trio.serve_tcp, take, 0, host="127.0.0.1"))
                port = silent.socket.getsockname()[1]
                peer = create_new_key_pair(bytes([number]) * 32)
                swarms.append([[f"/ip4/127.0.0.1/tcp/{port}/p2p/{ID.from_pubkey(peer.public_key)}"]])
            with monkeypatch.context() as patch:
                patch.setattr(former_peers, "_MACHINE", "no machine")  # else what is on loopback is not remembered
                for number, peers in enumerate(swarms):
                    FormerPeers([f"{PEER.format('127.0.0.1')}{number}"], key).write(peers, time.time())
            found = await inviting._find(key, lines.append, mdns=False)
            assert found == Found(tuple(own.addresses), OUR_EXACT, DialledFrom.MACHINE)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert len(dialled) < inviting.MOST_FORMER_SWARMS
    assert "still asking 1 peer of a former run" in lines
    assert lines[-1] == "30 s have passed, and nobody else is asked"


@in_trio
async def test_what_a_stranger_announces_never_counts_as_known_however_it_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is met through the own node at first, and then named by a former run."""
    monkeypatch.setattr(former_peers, "_MACHINE", "no machine")  # else what is on loopback is not remembered
    claim = "/ip4/8.8.8.8/tcp/4001/p2p/{}"
    async with exact_node() as own, exact_node(peers=own.addresses) as stranger:
        await until_online(stranger)
        (ours,), (real,), claimed = own.listening, stranger.listening, claim.format(stranger.peer)
        stranger.network._announced = [real, claimed]
        stranger.swarm.say(stranger.role.offer())
        while claimed not in told(own, stranger):
            await own.swarm.wait_changed()
        async with noted(own.network):
            found = await inviting._find(None, lambda _: None, mdns=False)
        assert found is not None
        assert (found.peers, found.reach) == ((ours, real, claimed), DialledFrom.MACHINE)
        FormerPeers([PEER.format("127.0.0.1")], None).write([[real, claimed]], time.time())
        found = await inviting._find(None, lambda _: None, mdns=False)
        assert found is not None
        assert (found.peers, found.reach) == ((real, claimed), DialledFrom.MACHINE)


def told(node: RunningNode, of: RunningNode) -> tuple[str, ...]:
    """The addresses that `node` has heard of another one."""
    heard = node.swarm.view.of_peer(PeerId(of.peer))
    return heard.addresses if heard else ()


@in_trio
async def test_an_address_that_no_command_can_read_is_in_no_invite() -> None:
    async with exact_node() as stranger:
        await until_online(stranger)
        real, malformed = stranger.listening, ("/ip4/8.8.8.8/banana", "/ip4/8.8.8.8/tcp/99999", "/ip4/8.8.8.8/udp/1")
        stranger.network._announced = [*real, *(f"{each}/p2p/{stranger.peer}" for each in malformed)]
        stranger.swarm.say(stranger.role.offer())
        found = await inviting._try(inviting._Way(NEARBY, [real], is_near=True), None, lambda _: None)
        assert found is not None and found.models == EXACT
        peers = read_invite(write_invite(Invite(found.peers))).peers
        assert peers == tuple(real)
        check_peers(peers)


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    out, err = capsys.readouterr()
    return out.strip(), err.splitlines()


def test_nothing_to_name_is_one_line_that_names_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invite", "--no-mdns"]) == 2
    out, (line,) = said(capsys)
    assert not out
    assert "no peers are named, and none were found: no node runs on this machine, no peer of a former run" in line
    assert "and mDNS is switched off; start `llmnode serve` or `llmnode relay` here, or give --peers ADDRESS" in line


def test_the_invite_of_a_key_whose_swarm_does_not_run_has_no_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = str(tmp_path / "swarm.key")
    for words in (f"made the key of a new swarm, {key}", "it names no peers to join through: start a relay"):
        assert main(["invite", "--swarm-key", key]) == 0
        out, (line, *_) = said(capsys)
        assert words in line
        assert read_invite(out).peers == () and read_invite(out).key


def test_a_file_with_an_invite_stands_for_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "invite"
    file.write_text(write_invite(Invite((PEER.format("10.0.0.1"),), b"k" * 32)))
    file.chmod(0o600)
    assert main(["invite", "--swarm-key", str(file), "--peers", PEER.format("8.8.8.8")]) == 0
    assert read_invite(said(capsys)[0]) == Invite((PEER.format("8.8.8.8"),), b"k" * 32)
    file.write_text(write_invite(Invite((PEER.format("10.0.0.1"),))))
    assert main(["invite", "--swarm-key", str(file)]) == 2
    assert "has the invite of a public swarm, and no key: leave --swarm-key out" in said(capsys)[1][-1]


def test_an_invite_in_the_settings_stands_for_its_key_and_makes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SECURITY.md says to put it there, for all commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMNODE_SWARM_KEY", write_invite(Invite((PEER.format("10.0.0.1"),), b"k" * 32)))
    assert main(["invite", "--peers", PEER.format("8.8.8.8"), "--json"]) == 0
    answer = json.loads(said(capsys)[0])
    assert read_invite(answer["invite"]) == Invite((PEER.format("8.8.8.8"),), b"k" * 32)
    assert answer["swarm_key"] is None and not os.listdir(tmp_path)
    monkeypatch.setenv("LLMNODE_SWARM_KEY", write_invite(Invite((PEER.format("10.0.0.1"),))))
    assert main(["invite"]) == 2
    assert "--swarm-key is the invite of a public swarm, and no key: leave it out" in said(capsys)[1][-1]
    assert main(["invite", "--swarm-key", "a" * 300]) == 2
    assert "cannot write the swarm key" in said(capsys)[1][-1]


@pytest.mark.parametrize(
    ("host", "words"), [("127.0.0.1", "on this machine alone"), ("10.0.0.1", "private network"), ("8.8.8.8", "")]
)
def test_it_is_said_where_an_invite_is_of_use(host: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invite", "--peers", PEER.format(host)]) == 0
    out, lines = said(capsys)
    assert read_invite(out).peers == (PEER.format(host),)
    assert bool(words) == bool(lines) == bool(warning_of_reach(widest([PEER.format(host)])))
    assert not words or words in lines[0]


def test_the_only_model_is_named_and_one_of_several_has_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert _model_of(None, [], "INVITE") is None
    for one in (replace(ONE, is_ours=True), replace(ONE, groups=2)):
        assert _model_of(None, [one], "INVITE") == ONE.elsewhere
        assert f"it names the model that the servers have, {ONE.elsewhere}" in said(capsys)[1][0]
    assert _model_of(None, [ONE], "INVITE") == ONE.elsewhere
    assert f"it names {ONE.elsewhere}, which only strangers at one address say that they serve" in said(capsys)[1][0]
    assert _model_of(None, [ONE, OTHER], "INVITE") is None, "no stranger keeps the user from an invite"
    assert f"several: {ONE.elsewhere}, {OTHER.elsewhere}; to name one: --model" in said(capsys)[1][0]
    assert _model_of(None, [replace(ONE, is_ours=True), replace(OTHER, groups=9)], "INVITE") == ONE.elsewhere
    assert f"it names the model of your own servers, {ONE.elsewhere}; " in (line := said(capsys)[1][0])
    assert f"others have {OTHER.elsewhere}; to name one" in line
    for asked in ("org/other", OTHER.elsewhere):
        assert _model_of(asked, [ONE, OTHER], "INVITE") == OTHER.elsewhere, "in the revision that is served"
    assert _model_of(None, EXACT, "INVITE") is None
    assert "the servers have exact in files, which all users of the invite need, too" in said(capsys)[1][0]


def test_an_invite_with_a_key_is_to_be_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert _model_of(None, EXACT, IN_FILE) is None
    (line,) = said(capsys)[1]
    assert f"llmnode chat --model MODEL {IN_FILE}" in line and f"llmnode serve MODEL --swarm-key {IN_FILE}" in line


def test_where_others_do_not_reach_the_options_that_help_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--announce ADDRESS" in (told := warning_of_reach(DialledFrom.NETWORK)) and "--relay ADDRESS" in told
    for ips, over_6 in ((["192.168.1.5"], False), (["192.168.1.5", "fe80::1"], False), (["2a00:1450::1"], True)):
        monkeypatch.setattr(listeners, "listenable_ips", lambda ips=ips: ips)
        told = warning_of_reach(DialledFrom.MACHINE)
        assert "--listen /ip4/0.0.0.0/tcp/4001" in told and ("--listen /ip6/::/tcp/4001" in told) == over_6


def test_a_model_that_nobody_there_serves_is_named_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmnode.node.commands.invite._name_elsewhere", lambda asked, _: asked)
    assert _model_of("org/third", [ONE], "INVITE") == "org/third"
    assert f"no server that answers has org/third: {ONE.elsewhere}" in said(capsys)[1][0]
    assert _model_of("org/third", [], "INVITE") == "org/third" and not said(capsys)[1], "a relay has none"


def announcement(peer: str, digest: bytes, model: str) -> Announcement:
    offer = Offer(model, Profile(digest, Precision()), 1, Span(0, 1), PeerState.ONLINE, 1, 1, 1)
    return Announcement(PeerId(peer), (), 1, 1, "", offer)


def test_the_model_of_the_own_node_goes_first_and_identities_at_one_address_count_once() -> None:
    own, good = hub_digest(b"a"), hub_digest(b"b")
    served = [announcement("own", own, "org/own")]
    served += [announcement(f"good{number}", good, "org/good") for number in range(2)]
    evil = [announcement(f"evil{number}", good, "evil/good") for number in range(9)]
    evil += [announcement(f"worse{number}", hub_digest(b"c"), "evil/worse") for number in range(9)]
    met = {each.peer: "evil" for each in evil} | {each.peer: each.peer for each in served}
    models = inviting._models([*evil, *served], met, [PeerId("own")])
    assert [(each.name, each.groups, each.is_ours) for each in models] == [
        ("org/own", 1, True),
        ("org/good", 3, False),
        ("evil/worse", 1, False),
    ]
    way = inviting._Way(HERE, [["/x/p2p/own"], ["/x/p2p/named"]], is_near=False, own=PeerId("own"))
    assert inviting._ours(way, {PeerId("own"), PeerId("named")}) == ["own"]
    assert inviting._ours(way, {PeerId("named"), PeerId("other")}) == ["named"], "the own one is a relay"
    assert not inviting._ours(replace(way, is_near=True), {PeerId("own")})


def hub_digest(letter: bytes) -> bytes:
    return bytes([0xF2]) + bytes(11) + letter * 20


def test_a_name_that_an_invite_cannot_have_is_none() -> None:
    digest = bytes([0xF2]) + bytes(11) + b"c" * 20
    assert inviting._elsewhere("org/name", digest) == f"org/name@{'63' * 20}"
    for name in ("../name", "org/name/more", "x" * 300 + "/y", "org/a b", "\x1b[31m/x"):
        assert inviting._elsewhere(name, digest) is None
    assert inviting._elsewhere(EMBEDDED_MODEL, b"any") == EMBEDDED_MODEL


def test_a_private_node_says_how_to_make_its_invite_and_never_shows_the_key(tmp_path: Path) -> None:
    invite = write_invite(Invite((), b"k" * 32))
    for given in (invite, None):
        assert private_invite(given, ["a"]).startswith("others join by the invite that this node was started with")
    file = tmp_path / "my key"
    told = private_invite(file, [PEER.format("8.8.8.8")], "org/name")
    assert told.endswith(f"llmnode invite --swarm-key '{file}' --peers {PEER.format('8.8.8.8')} --model org/name")


def test_a_qr_code_is_left_out_where_stdout_has_no_characters_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for encoding, is_shown in (("ascii", False), ("latin-1", False), ("utf-8", True)):
        out, err = io.BytesIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, write_through=True))
        monkeypatch.setattr(sys, "stderr", err)
        monkeypatch.setenv("COLUMNS", "200")
        assert main(["invite", "--peers", PEER.format("8.8.8.8"), "--qr"]) == 0
        invite, *code = out.getvalue().decode(encoding).splitlines()
        assert read_invite(invite).peers == (PEER.format("8.8.8.8"),)
        assert bool(code) == is_shown
        assert is_shown or f"no QR code is shown: {encoding}" in err.getvalue()


@in_trio
async def test_a_relay_prints_its_invite_and_one_with_a_key_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "swarm.key"
    key = make_key(file)
    for to, given in ((Invite(()), None), (Invite((), key), file)):
        async with open_relay([LISTEN_ANY_LOOPBACK], [], to, None) as network:
            arguments = Namespace(json=False, identity=None, swarm_key=given)
            relay._ready(network, arguments, is_private=to.key is not None)
            out, (warned,) = said(capsys)
            assert "of use on this machine alone" in warned
            arguments.json = True
            relay._ready(network, arguments, is_private=to.key is not None)
            invite = json.loads(said(capsys)[0])["invite"]
            if to.key is None:
                assert read_invite(invite) == Invite(tuple(network.addresses)) and f"serve {invite}\n" in out
            else:
                assert invite is None and "llmnode-invite-" not in out
                made = out.rpartition("shown here: llmnode ")[2].split()
                assert main(made) == 0
                assert read_invite(said(capsys)[0]) == Invite(tuple(network.addresses), key)
