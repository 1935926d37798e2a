"""Getting into a swarm: a silent peer holds up nobody, and peers of a former run are asked if no named one answers."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import stat
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import JoinPolicy, LinkPolicy
from llmnode.errors import ConfigError, PeerError, PeerUnreachable
from llmnode.swarm import former_peers
from llmnode.swarm.entering import enter
from llmnode.swarm.former_peers import FormerPeers
from llmnode.swarm.join import join_swarm
from llmnode.swarm.remembering import recall, remember
from unit.exact_nodes import exact_node
from unit.hanging import gone_on, hanging
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

POLICY = JoinPolicy()
SILENT, REFUSES = math.inf, -1.0
NOW_S = 1.7e9
DAY_S = 86_400.0


class Internet:
    """Each peer answers after its number of seconds; SILENT never does, REFUSES refuses at once."""

    def __init__(self, **answers: float) -> None:
        self.answers = answers
        self.asked: list[tuple[float, str]] = []

    async def meet(self, addresses: Sequence[str]) -> None:
        (name,) = addresses
        self.asked.append((trio.current_time(), name))
        if name == "malformed":
            raise ConfigError("malformed")
        if self.answers[name] == REFUSES:
            raise PeerUnreachable(name)
        await trio.sleep(self.answers[name])

    def enter(self, named: Sequence[str], former: Sequence[str] = ()) -> tuple[bool, float]:
        """Whether a named peer has answered, and the seconds that it took."""

        async def main() -> tuple[bool, float]:
            began_s = trio.current_time()
            async with trio.open_nursery() as nursery:
                found = await enter(
                    self.meet, nursery.start_soon, [[each] for each in named], [[each] for each in former]
                )
                nursery.cancel_scope.cancel()
            return found, trio.current_time() - began_s

        try:
            return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        except* (PeerError, ConfigError) as group:
            raise group.exceptions[0] from None


def test_all_that_answer_are_met_before_it_goes_on() -> None:
    found, took_s = Internet(a=0.1, b=1.5).enter(["a", "b"])
    assert found and took_s == pytest.approx(1.5)


def test_a_silent_peer_holds_up_nobody() -> None:
    found, took_s = Internet(a=0.1, b=SILENT).enter(["a", "b"])
    assert found and took_s == pytest.approx(0.1 + POLICY.moment_s + 0.1)


def test_former_peers_are_left_alone_while_a_named_one_answers() -> None:
    net = Internet(a=0.9, old=0.0)
    assert net.enter(["a"], ["old"])[0]
    assert [name for _, name in net.asked] == ["a"]


@pytest.mark.parametrize(("dead", "from_s"), [(REFUSES, 0.0), (SILENT, POLICY.former_after_s)])
def test_former_peers_are_found_if_no_named_one_answers(dead: float, from_s: float) -> None:
    found, took_s = Internet(a=dead, b=dead, gone=SILENT, old=0.1).enter(["a", "b"], ["gone", "old"])
    assert not found
    assert took_s == pytest.approx(from_s + 0.1 + POLICY.former_moment_s)


def test_former_peers_are_asked_a_few_at_a_time() -> None:
    gone = {f"gone{number}": SILENT for number in range(POLICY.former_at_once)}
    net = Internet(a=REFUSES, **gone, old=0.1)
    found, _ = net.enter(["a"], [*gone, "old"])
    asked_s = {name: at_s - net.asked[0][0] for at_s, name in net.asked}
    assert not found
    assert {asked_s[each] for each in gone} == {0.0} and asked_s["old"] == POLICY.former_after_s


def test_the_error_is_that_of_the_first_named_peer() -> None:
    with pytest.raises(PeerUnreachable, match="a"):
        Internet(a=REFUSES, b=REFUSES, old=REFUSES).enter(["a", "b"], ["old", "malformed"])
    with pytest.raises(ConfigError, match="malformed"):
        Internet(a=SILENT).enter(["a", "malformed"])
    assert Internet(old=REFUSES).enter([], ["old"])[0], "nobody was named: then nobody needs to answer"


CONTACT, OTHER = "/ip4/203.0.113.7/tcp/4001/p2p/contact", "/ip4/203.0.113.8/tcp/4001/p2p/other"


def address(name: str, host: str = "198.51.100.7") -> str:
    return f"/ip4/{host}/tcp/4001/p2p/{name}"


@pytest.fixture
def remembered(tmp_path: Path) -> Callable[..., FormerPeers]:
    path = tmp_path / "cache" / "peers.json"
    return functools.partial(FormerPeers, path=path)


def test_peers_are_read_back_by_any_of_the_contacts_and_by_no_other(remembered: Callable[..., FormerPeers]) -> None:
    peers = [[address("a"), address("a", "2001:db8::7")], [address("b")]]
    remembered([CONTACT, OTHER], b"key").write(peers, NOW_S)
    for contacts in ([CONTACT], [OTHER], [CONTACT, address("new")]):
        assert remembered(contacts, b"key").read(NOW_S + DAY_S) == peers
    assert not remembered([CONTACT], None).read(NOW_S), "that is another swarm"
    assert not remembered([address("new")], b"key").read(NOW_S)
    assert not remembered([CONTACT], b"key").read(NOW_S + POLICY.forget_after_s + 1)


def test_the_swarms_of_a_key_are_found_without_their_contacts(remembered: Callable[..., FormerPeers]) -> None:
    near, nearer = address("near", "192.168.7.7"), address("nearer", "10.7.7.7")
    remembered([CONTACT, OTHER], b"key").write([[near, address("a")], [nearer]], NOW_S)
    remembered([address("home", "10.0.0.1")], b"key").write([[nearer], [near]], NOW_S + 60)
    remembered([CONTACT], None).write([[address("b")]], NOW_S + 120)
    assert remembered([], b"key").swarms(NOW_S + DAY_S) == [[[nearer]], [[address("a")]]], "the latest first"
    assert remembered([], None).swarms(NOW_S) == [[[address("b")]]]
    assert not remembered([], b"other").swarms(NOW_S)
    assert not remembered([], b"key").swarms(NOW_S + POLICY.forget_after_s + 61)


def test_a_file_of_before_is_read_and_written_anew(remembered: Callable[..., FormerPeers], tmp_path: Path) -> None:
    peers, file = [[address("a")]], tmp_path / "cache" / "peers.json"
    remembered([CONTACT], None).write(peers, NOW_S)
    content = json.loads(file.read_text())
    content["swarms"] = {key: {"s": each["s"], "peers": each["peers"]} for key, each in content["swarms"].items()}
    file.write_text(json.dumps(content))
    assert remembered([CONTACT], None).read(NOW_S) == peers and not remembered([], None).swarms(NOW_S)
    remembered([CONTACT], None).write(peers, NOW_S + 60)
    assert remembered([], None).swarms(NOW_S + 60) == [peers]


def test_the_file_is_for_its_owner_and_says_neither_who_was_named_nor_the_key(
    remembered: Callable[..., FormerPeers], tmp_path: Path
) -> None:
    keys = [b"k" * 32, b"l" * 32, None]
    for key in keys:
        remembered([CONTACT], key).write([[CONTACT], [OTHER]], NOW_S)
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    names = set(json.loads(text)["swarms"])
    assert len(names) == len(keys), "a peer has another name in each swarm"
    for told in ("contact", b"contact".hex(), hashlib.sha256(b"contact").hexdigest()):
        assert not any(told in name for name in names)
    for key in filter(None, keys):
        assert key.decode() not in text and key.hex() not in text
    assert CONTACT in text and OTHER in text, "the peers themselves are there"


def test_the_file_is_written_when_peers_have_changed_and_once_a_day(
    remembered: Callable[..., FormerPeers], tmp_path: Path
) -> None:
    def wrote(peers: Sequence[Sequence[str]], now_s: float) -> bool:
        file = tmp_path / "cache" / "peers.json"
        before = file.stat().st_ino if file.exists() else None
        remembered([CONTACT], None).write(peers, now_s)
        return file.stat().st_ino != before

    a, b = [address("a")], [address("b")]
    assert wrote([a, b], NOW_S)
    assert not wrote([a, b], NOW_S + 60) and not wrote([b, a], NOW_S + 120)
    assert wrote([a], NOW_S + 180)
    assert wrote([a], NOW_S + 180 + POLICY.rewrite_after_s)
    assert wrote([a], NOW_S), "the clock was wrong"
    remembered([OTHER], None).write([b], NOW_S)
    assert not wrote([a], NOW_S)


def test_a_file_of_another_version_is_not_read(remembered: Callable[..., FormerPeers], tmp_path: Path) -> None:
    peers, file = remembered([CONTACT], None), tmp_path / "cache" / "peers.json"
    peers.write([[address("a")]], NOW_S)
    assert peers.read(NOW_S)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    assert not peers.read(NOW_S)


def test_everything_has_a_limit(remembered: Callable[..., FormerPeers], tmp_path: Path) -> None:
    many = [[address(f"peer{number}")] * 9 for number in range(100)]
    for number in range(POLICY.former_swarms + 5):
        remembered([address(f"contact{number}")], None).write(many, NOW_S + number)
    content = json.loads((tmp_path / "cache" / "peers.json").read_text())
    assert len(content["swarms"]) == POLICY.former_swarms
    assert {len(each["peers"]) for each in content["swarms"].values()} == {POLICY.former_peers}
    assert {len(of) for each in content["swarms"].values() for of in each["peers"]} == {POLICY.former_addresses}
    assert not remembered([address("contact0")], None).read(NOW_S), "the oldest are forgotten"
    assert remembered([address(f"contact{number}")], None).read(NOW_S)


def test_a_swarm_of_this_machine_and_an_empty_one_are_not_written(
    remembered: Callable[..., FormerPeers], tmp_path: Path
) -> None:
    remembered(["/ip4/127.0.0.1/tcp/1/p2p/contact"], None).write([[address("a")]], NOW_S)
    assert not (tmp_path / "cache").exists()
    remembered([CONTACT], None).write([[address("a")]], NOW_S)
    remembered([CONTACT], None).write([], NOW_S + 1)
    assert remembered([CONTACT], None).read(NOW_S + 2), "a run that met nobody does not forget those of before"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.just(10**400) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["swarms", "s", "peers", "x"]), inner),
)


@given(json_values)
def test_a_damaged_file_is_as_if_it_were_not_there(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("cache")
    peers = FormerPeers([CONTACT], None, path=folder / "peers.json")
    peers.write([[address("a")]], NOW_S)
    (key,) = json.loads((folder / "peers.json").read_text())["swarms"]
    timed = {"s": value, "peers": [[address("a")]]} if value != NOW_S else None
    listed = {"s": NOW_S, "peers": value if isinstance(value, list) else [value, [value]]}
    wholes = ({"version": 1, "swarms": {key: each}} for each in (value, timed, listed))
    for damaged in (json.dumps(value), *map(json.dumps, wholes), "{", "\0"):
        (folder / "peers.json").write_text(damaged)
        assert not peers.read(NOW_S)
    peers.write([[address("b")]], NOW_S)
    assert peers.read(NOW_S) == [[address("b")]]


def test_a_file_that_another_user_could_have_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    peers = FormerPeers([CONTACT], None)
    peers.write([[address("a")]], NOW_S)
    assert peers.read(NOW_S)
    (tmp_path / "cache").chmod(0o777)
    assert not peers.read(NOW_S)
    peers.write([[address("b")]], NOW_S)
    (tmp_path / "cache").chmod(0o755)
    assert peers.read(NOW_S) == [[address("a")]], "nothing was written there either"


def test_a_peer_cannot_fill_the_file_with_long_text(remembered: Callable[..., FormerPeers]) -> None:
    remembered([CONTACT], None).write([["/ip4/" + "\N{SNOWMAN}" * 200 + "/p2p/x"], [address("a")]], NOW_S)
    assert remembered([CONTACT], None).read(NOW_S) == [[address("a")]]


@in_trio
async def test_a_second_start_finds_the_swarm_when_the_named_peer_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(former_peers, "_MACHINE", "no machine")  # else what is on loopback is not remembered
    async with exact_node() as server:
        async with exact_node(peers=server.addresses) as contact:
            named = list(contact.addresses)
            async with join_swarm(named, LinkPolicy()) as (_, swarm):
                while server.peer not in {each.peer for each in swarm.view.announcements()}:
                    await swarm.wait_changed()
        began_s = trio.current_time()
        async with join_swarm(named, LinkPolicy()) as (_, swarm):
            assert server.peer in {each.peer for each in swarm.view.announcements()}
        assert trio.current_time() - began_s < 10
        assert "none of the named peers answers" in caplog.text
        async with exact_node(peers=named) as second:
            assert server.peer in {each.peer for each in second.swarm.view.announcements()}


@in_trio
async def test_a_node_remembers_the_others_and_not_itself(remembered: Callable[..., FormerPeers]) -> None:
    known = remembered([CONTACT], None)
    async with exact_node() as server, exact_node(peers=server.addresses) as second:
        assert second.peer in second.swarm.view
        with trio.CancelScope() as scope:
            scope.cancel()
            await remember(second.swarm, known)
        assert known.read(time.time()) == [list(server.addresses)]


@in_trio
async def test_a_disk_that_hangs_holds_up_neither_the_start_of_a_node_nor_its_end(
    remembered: Callable[..., FormerPeers], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = remembered([CONTACT], None)
    async with exact_node() as server, exact_node(peers=server.addresses) as second:
        with hanging(monkeypatch, former_peers, "read_file") as hung:
            assert await recall(known) == []
            with trio.CancelScope() as scope:
                scope.cancel()
                await remember(second.swarm, known)
            assert hung.count == 1
        await gone_on()


@in_trio
async def test_peers_that_only_mdns_has_named_are_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(former_peers, "_MACHINE", "no machine")
    async with exact_node() as server, exact_node() as other:
        async with join_swarm(server.addresses, LinkPolicy(), is_near=True) as (pool, swarm):
            assert server.peer in {each.peer for each in swarm.view.announcements()}
            assert not swarm.contacts
            with pytest.raises(PeerUnreachable, match="a private network that this node is not in"):
                await pool.connect(other.addresses)
        assert not (tmp_path / "cache").exists(), "it remembers nothing of them"
