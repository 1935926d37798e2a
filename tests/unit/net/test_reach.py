"""How others see a node, and whether they can dial it: what they say is judged, and what they are asked is little."""

from __future__ import annotations

import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from libp2p.host.autonat.pb.autonat_pb2 import Message
from multiaddr import Multiaddr

from llmnode.core.address_groups import address_groups
from llmnode.core.ids import PeerId
from llmnode.core.peers.nat import Nat, Reach, Reached, Sight, judge
from llmnode.core.policy import LinkPolicy, ReachPolicy
from llmnode.net.addresses import parse_peer, tcp_address
from llmnode.net.circuit_wire import receive, send
from llmnode.net.connections import open_stream
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.reach import AUTONAT, DialBackRefused, DialBacks
from llmnode.node.doctor import OK, WARNING, reach_findings
from llmnode.node.reach import explain
from llmnode.wire.frame import Frame, FrameType
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from libp2p.network.swarm import Swarm

POLICY = ReachPolicy()
OK_STATUS, ERROR, REFUSED, BAD = Message.OK, Message.E_DIAL_ERROR, Message.E_DIAL_REFUSED, Message.E_BAD_REQUEST


def listening(host: str = "127.0.0.1") -> Any:  # Any: an async context manager
    return open_network([f"/ip4/{host}/tcp/0"], LinkPolicy())


# The answers of others are judged


def sight(peer_host: str, host: str, port: int, reached: Reached = Reached.NO, at: str = "") -> Sight:
    return Sight(PeerId("P"), peer_host, host, port, reached, at)


@pytest.mark.parametrize(
    ("sights", "expected"),
    [
        ([], None),
        ([sight("a", "own", 5)], (Nat.NONE, Reached.NO)),
        ([sight("a", "own", 5, Reached.YES, "x"), sight("b", "own", 5)], (Nat.NONE, Reached.YES)),
        ([sight("a", "out", 5), sight("b", "out", 5)], (Nat.STEADY, Reached.NO)),
        ([sight("a", "out", 5), sight("b", "out", 6)], (Nat.SYMMETRIC, Reached.NO)),
        ([sight("a", "out", 5), sight("b", "other", 5), sight("c", "other", 5)], (Nat.SYMMETRIC, Reached.NO)),
        ([sight("a", "out", 5)], (Nat.SOME, Reached.NO)),
        ([sight("a", "out", 5), sight("a", "out", 5)], (Nat.SOME, Reached.NO)),
        ([sight("a", "out", 5, Reached.NOT_TRIED)], (Nat.SOME, Reached.NOT_TRIED)),
        ([sight("a", "out", 5, Reached.YES, "x")], (Nat.SOME, Reached.YES)),
    ],
)
def test_what_several_peers_see_says_what_the_nat_is(sights: list[Sight], expected: tuple[Nat, Reached] | None) -> None:
    reach = judge(sights, {"own"})
    assert (reach and (reach.nat, reach.reached)) == expected
    if reach is not None:
        assert reach.reached_at == ("x" if reach.reached is Reached.YES else "")


def test_the_address_that_most_see_counts() -> None:
    sights = [sight("a", "odd", 5), sight("b", "out", 5), sight("c", "out", 5)]
    reach = judge(sights, set())
    assert reach is not None
    assert reach.host == "out"


@pytest.mark.parametrize("nat", list(Nat))
@pytest.mark.parametrize("reached", list(Reached))
def test_who_is_not_reached_is_told_what_to_do(nat: Nat, reached: Reached) -> None:
    reach = Reach(nat, reached, "203.0.113.7", 40001, "/ip4/203.0.113.7/tcp/4001" if reached is Reached.YES else "")
    text, fix = explain(reach)
    assert "203.0.113.7" in text
    assert bool(fix) == (reached is not Reached.YES)
    assert "{" not in fix
    assert [each.verdict for each in reach_findings([reach])] == [WARNING if reached is Reached.NO else OK]
    assert [each.verdict for each in reach_findings([])] == [OK]


def test_who_is_reached_over_one_version_of_ip_alone_is_told_how_to_keep_that() -> None:
    at_6, at_4 = "/ip6/2a00::7/tcp/4001", "/ip4/203.0.113.7/tcp/4001"
    reached_4, reached_6 = (
        Reach(Nat.NONE, Reached.YES, host, 4001, at) for host, at in (("203.0.113.7", at_4), ("2a00::7", at_6))
    )
    behind_nat, behind_firewall = (
        Reach(nat, Reached.NO, host, 40001, "") for nat, host in ((Nat.STEADY, "203.0.113.7"), (Nat.NONE, "2a00::7"))
    )
    text, fix = explain(behind_nat, [behind_nat, reached_6])
    assert text.endswith("and cannot dial it; over IPv6 they can")
    assert "--announce /ip4/203.0.113.7/tcp/PORT" in fix and fix.endswith(f"; then --announce {at_6}, too")
    text, fix = explain(behind_firewall, [reached_4, behind_firewall])
    assert text.endswith("and cannot dial it; over IPv4 they can")
    assert "over IPv6 in the firewall" in fix and "relay" not in fix
    assert "--listen /ip4/0.0.0.0/tcp/PORT --listen /ip6/::/tcp/PORT" in fix
    _, fix = explain(behind_firewall, [behind_nat, behind_firewall])
    assert "(--listen /ip6/::/tcp/PORT), or serve with --relay" in fix
    assert explain(reached_6, [behind_nat, reached_6])[1] == ""


# They are asked


@in_trio
async def test_who_listens_is_reached_by_others_and_leaves_nothing_with_them() -> None:
    async with listening() as one, listening("127.0.0.2") as other, listening() as own:
        reach = await own.look([one.addresses[0], other.addresses[0]], POLICY)
        assert (reach.nat, reach.reached) == (Nat.NONE, Reached.YES)
        assert reach.reached_at == own.listening[0].partition("/p2p/")[0]
        for network in (one, other, own):
            while network.count_open().connections:
                await trio.testing.wait_all_tasks_blocked(0.01)


@in_trio
async def test_of_what_strangers_announce_only_ip_addresses_are_asked() -> None:
    async with listening() as one, listening() as own:
        peer = one.addresses[0].rpartition("/p2p/")[2]
        odd = [f"{start}/p2p/{peer}" for start in ("", "garbage", "/ip4/999.1.1.1/tcp/1", "/dns4/localhost/tcp/1")]
        behind = f"{one.addresses[0]}/p2p-circuit/p2p/{peer}"
        reach = await own.look(
            [*odd, behind, "/ip4/127.0.0.1/tcp/1/p2p/nobody", one.addresses[0]], replace(POLICY, peers=1)
        )
        assert reach.reached is Reached.YES
        assert await own.look(odd, POLICY) is None


@in_trio
async def test_who_does_not_answer_in_time_is_left_with_nothing_open(recwarn: pytest.WarningsRecorder) -> None:
    gc.collect()
    recwarn.clear()  # of other tests
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with listening() as one, listening() as own:
            peer = one.addresses[0].rpartition("/p2p/")[2]
            address = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{peer}"
            assert await own.look([address], replace(POLICY, look_s=0.2)) is None
        gc.collect()
        assert not [each for each in recwarn if each.category is ResourceWarning]


@in_trio
async def test_who_listens_where_nobody_sees_it_is_not_reached() -> None:
    async with listening() as one, listening("127.0.0.3") as own:  # seen at 127.0.0.1, its port is free there
        reach = await own.look([one.addresses[0]], POLICY)
        assert reach.reached is Reached.NO
        assert reach.host == "127.0.0.1"


@in_trio
async def test_a_link_that_is_opened_meanwhile_stays() -> None:
    asked, answer = trio.Event(), trio.Event()
    async with listening() as one, listening() as own:
        handler = DialBacks(one.host.get_network(), one._gate, POLICY)

        async def take_later(stream: Any) -> None:
            asked.set()
            await answer.wait()
            await handler.take_request(stream)

        one.host.set_stream_handler(AUTONAT, take_later)

        async def look() -> None:
            assert (await own.look([one.addresses[0]], POLICY)).reached is Reached.YES

        async with trio.open_nursery() as looking:
            looking.start_soon(look)
            await asked.wait()
            link = await own.dial(one.addresses[0])
            answer.set()
        async with one.accept() as accepted:
            await link.send(Frame(FrameType.VIEW))
            assert (await accepted.receive()).type is FrameType.VIEW


@in_trio
async def test_peers_that_do_not_answer_have_seen_nothing() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with listening() as one, listening() as own:
            silent = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{one.peer}"
            relayed = f"{one.addresses[0]}/p2p-circuit/p2p/{own.peer}"
            assert await own.look([silent, relayed], replace(POLICY, look_s=0.3)) is None


# Requests of others


@asynccontextmanager
async def asking(policy: ReachPolicy = POLICY) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork, Any]]:
    """The host that is asked, the one that asks, and how: `await ask(message)`."""
    async with listening() as asked, listening() as own:
        asked.host.set_stream_handler(
            AUTONAT, DialBacks(cast(Any, asked.host.get_network()), asked._gate, policy).take_request
        )
        own.vouch(asked.addresses)
        await own.host.connect(parse_peer(asked.addresses[0]))
        (connection,) = own.host.get_network().get_connections(asked.host.get_id())

        async def ask(message: Message | bytes) -> Any:
            stream = await open_stream(connection, AUTONAT, 5)
            if isinstance(message, bytes):
                await stream.muxed_stream.write(message)
            else:
                await send(stream.muxed_stream, message)
            return (await receive(stream.muxed_stream, Message())).dialResponse

        yield asked, own, ask


def dial(network: Libp2pNetwork, *addresses: str, peer: bytes | None = None) -> Message:
    named = [Multiaddr(each).to_bytes() for each in addresses]
    own = network.host.get_id().to_bytes() if peer is None else peer
    return Message(type=Message.DIAL, dial=Message.Dial(peer=Message.PeerInfo(id=own, addrs=named)))


def place_of(network: Libp2pNetwork) -> str:
    return network.listening[0].partition("/p2p/")[0]


@in_trio
async def test_the_first_address_that_answers_is_named() -> None:
    async with asking() as (_asked, own, ask):
        answer = await ask(dial(own, "/ip4/127.0.0.1/tcp/1", place_of(own)))
        assert (answer.status, str(Multiaddr(answer.addr))) == (OK_STATUS, place_of(own))


@in_trio
async def test_nobody_else_is_dialled_for_who_asks() -> None:
    with socket.socket() as victim:
        victim.bind(("127.0.0.9", 0))
        victim.listen()
        victim.setblocking(False)
        async with asking() as (_asked, own, ask):
            for named in (
                f"/ip4/127.0.0.9/tcp/{victim.getsockname()[1]}",
                "/dns4/localhost/tcp/1",
                "/ip4/127.0.0.1/udp/1",
            ):
                assert (await ask(dial(own, named))).status == REFUSED
            with pytest.raises(BlockingIOError):
                victim.accept()


@in_trio
async def test_another_node_at_the_address_does_not_count() -> None:
    async with asking() as (asked, own, ask):
        assert (await ask(dial(own, place_of(asked)))).status == ERROR


@in_trio
async def test_nobody_learns_why_it_is_not_reached() -> None:
    async with asking() as (asked, own, ask):
        answers = [await ask(dial(own, each)) for each in ("/ip4/127.0.0.1/tcp/1", place_of(asked))]
        assert answers[0] == answers[1]
        assert answers[0].status == ERROR


@in_trio
async def test_what_is_no_request_is_refused() -> None:
    async with asking() as (asked, own, ask):
        for message in (
            b"\x03abc",
            Message(type=Message.DIAL_RESPONSE),
            dial(own, place_of(own), peer=asked.host.get_id().to_bytes()),
        ):
            assert (await ask(message)).status == BAD
        assert (await ask(dial(own, place_of(own), peer=b""))).status == OK_STATUS, "it is who asks"


@pytest.mark.parametrize("limit", ["requests_per_minute", "group_requests_per_minute", "host_requests_per_minute"])
@in_trio
async def test_who_asks_too_often_is_refused(limit: str) -> None:
    policies: dict[str, Any] = {limit: 2}
    async with asking(replace(POLICY, **policies)) as (_asked, own, ask):
        statuses = [(await ask(dial(own, place_of(own)))).status for _ in range(3)]
        assert statuses == [OK_STATUS, OK_STATUS, REFUSED]


@pytest.mark.parametrize("block", ["8.8.8.{}", "2606:4700:0:{}::1"])
@in_trio
async def test_one_address_group_leaves_requests_to_others(block: str) -> None:
    async with listening() as asked:
        dial_backs = DialBacks(cast("Swarm", asked.host.get_network()), asked._gate, POLICY)
        taken = 0
        for number in range(2 * POLICY.requests_per_minute):
            with suppress(DialBackRefused):
                dial_backs._count(*address_groups(block.format(number)))
                taken += 1
        assert taken <= POLICY.requests_per_minute / 2
        dial_backs._count(*address_groups("9.9.9.9"))


@in_trio
async def test_a_door_that_stays_shut_is_given_up() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with asking(replace(POLICY, dial_s=0.2)) as (_asked, own, ask):
            shut = str(tcp_address(*mute.getsockname()))
            assert (await ask(dial(own, shut, place_of(own)))).status == ERROR
