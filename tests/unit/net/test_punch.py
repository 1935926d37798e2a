"""From relayed to direct over real libp2p hosts on loopback: what is dialled, and what two agree to dial."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch

from llmnode.core.policy import CircuitPolicy, PoolPolicy, PunchPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, host_and_port, may_be_dialled, parse_relay, tcp_address
from llmnode.net.circuit_wire import receive, send
from llmnode.net.connections import is_relayed, open_stream
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.punch import PUNCH
from llmnode.swarm.pool import open_pool
from unit.circuits import (
    POLICY,
    check_echo,
    dialling,
    echoing,
    listening_behind,
    relaying,
    reserving,
    until,
)
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream
    from multiaddr import Multiaddr

    from llmnode.net.link import Libp2pLink

PUNCHING = CircuitPolicy(punch=PunchPolicy(dial_s=1.0, grace_s=0.1))
FEW = PunchPolicy(tries=2, talk_s=0.3, dial_s=0.3, addresses=3)
SYNC = HolePunch(type=HolePunch.SYNC)
NOWHERE = tcp_address("127.0.0.1", 1)


def peer_id(network: Libp2pNetwork) -> ID:
    return ID.from_string(network.peer)


@in_trio
async def test_a_direct_address_is_dialled_though_there_is_a_circuit_which_goes_with_its_link() -> None:
    async with relaying() as relay, listening_behind(relay) as server, echoing(server), dialling() as client:
        relayed = await client.dial(server.addresses[0])
        direct = await client.dial(server.listening[0])
        assert (relayed.relayed, direct.relayed) == (True, False)
        await check_echo(relayed)
        await check_echo(direct)
        assert not (await client.dial(server.addresses[0])).relayed, "what is there, and best"
        await relayed.end("done")
        await until(lambda: relay.count_open().circuits == 0)
        await until(lambda: client.count_open().connections == 1)
        await check_echo(direct)


@in_trio
async def test_a_circuit_without_a_link_goes_when_there_is_a_direct_connection() -> None:
    async with relaying() as relay, listening_behind(relay) as server, echoing(server), dialling() as client:
        relayed = await client.dial(server.addresses[0])
        with client._held.hold(relayed._stream.connection.muxed_conn):  # like a caller that is about to open a stream
            await relayed.end("done")
            await relayed.wait_closed()
        assert relay.count_open().circuits == 1
        direct = await client.dial(server.listening[0])
        await until(lambda: relay.count_open().circuits == 0)
        await check_echo(direct)
        assert (client.count_open().links, client.count_open().connections) == (1, 1)


@in_trio
async def test_who_was_dialled_through_a_relay_is_connected_directly_soon_and_new_links_are_direct() -> None:
    async with (
        relaying() as relay,
        listening_behind(relay, policy=PUNCHING) as server,
        echoing(server),
        dialling() as client,
    ):
        relayed = await client.dial(server.addresses[0])
        assert relayed.relayed
        await client._puncher.wait_direct(peer_id(server))
        direct = await client.dial(server.addresses[0])
        assert not direct.relayed
        await check_echo(relayed)
        await check_echo(direct)
        await relayed.end("done")
        await until(lambda: relay.count_open().circuits == 0)
        await check_echo(direct)


@in_trio
async def test_a_direct_link_follows_a_relayed_one_which_ends_when_nothing_uses_it() -> None:
    async with (
        relaying() as relay,
        listening_behind(relay, policy=PUNCHING) as server,
        echoing(server),
        dialling() as client,
        open_pool(client, PoolPolicy(idle_s=0.1)) as pool,
    ):
        client.vouch(server.addresses)
        relayed = await pool.connect(server.addresses)
        assert relayed.relayed
        await relayed.wait_ended()
        assert [each.relayed for each in pool.living()] == [False]
        assert (await pool.connect(server.addresses)) is pool.living()[0]
        await until(lambda: relay.count_open().circuits == 0)
        await until(lambda: (client.count_open().links, client.count_open().relayed) == (1, 0))


def connect(*addresses: Multiaddr) -> HolePunch:
    return HolePunch(type=HolePunch.CONNECT, ObsAddrs=[each.to_bytes() for each in addresses])


async def check_refused(connection: SwarmConn, *said: bytes) -> None:
    async def ask() -> None:
        stream = await open_stream(connection, PUNCH, 5.0)
        for each in said:
            await stream.write(each)
        await receive(stream.muxed_stream, HolePunch())

    with pytest.raises((PeerUnreachable, BaseLibp2pError)):
        await ask()


class Asker:
    """A peer that was dialled through a relay, and asks for anything."""

    def __init__(self, relay: Libp2pNetwork, network: Libp2pNetwork, client: Libp2pNetwork, link: Libp2pLink) -> None:
        self._relayed = network._held.living(peer_id(client))[0]
        self.relay = relay
        self.network = network
        self.client = client
        self.link = link

    async def ask(self) -> NetStream:
        return await open_stream(self._relayed, PUNCH, 5.0)

    async def ask_to_dial(self, *addresses: Multiaddr) -> None:
        stream = await self.ask()
        await send(stream.muxed_stream, connect(*addresses))
        answer = await receive(stream.muxed_stream, HolePunch())
        assert answer.type == HolePunch.CONNECT
        await send(stream.muxed_stream, SYNC)

    async def check_refused(self, *said: bytes) -> None:
        """The client ends the stream without a word, and the link goes on."""
        await check_refused(self._relayed, *said)
        await check_echo(self.link)


@asynccontextmanager
async def asking(policy: PunchPolicy) -> AsyncIterator[Asker]:
    """A client with `policy` that has dialled somebody through a relay."""
    async with (
        relaying() as relay,
        reserving(relay) as network,
        echoing(network),
        open_network([], POLICY, circuit_policy=CircuitPolicy(punch=policy)) as client,
    ):
        link = await client.dial(network.addresses[0])
        await check_echo(link)
        yield Asker(relay, network, client, link)


def framed(message: HolePunch) -> bytes:
    body = message.SerializeToString()
    return bytes([len(body)]) + body


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x05hello",
        b"\x10cut",
        b"\xff\xff\xff\xff",
        b"\x00",
        framed(SYNC),
        framed(connect()),
        framed(HolePunch(type=HolePunch.CONNECT, ObsAddrs=[b"nothing", b"", b"\x04\x7f"])),
        framed(connect(tcp_address("10.0.0.1", 22), tcp_address("169.254.0.1", 80), tcp_address("::1", 22))),
    ],
    ids=["nothing", "rubbish", "cut", "endless", "empty", "SYNC", "no address", "no addresses", "not ours to dial"],
)
@in_trio
async def test_who_asks_for_what_cannot_be_is_not_answered_and_the_link_goes_on(said: bytes) -> None:
    async with asking(FEW) as asker:
        await asker.check_refused(said)
        assert not asker.client._puncher._dialling


@in_trio
async def test_a_sync_that_never_comes_is_not_waited_for_and_nobody_dials() -> None:
    async with asking(FEW) as asker, listeners(1) as (reached, addresses):
        stream = await asker.ask()
        await send(stream.muxed_stream, connect(*addresses))
        assert (await receive(stream.muxed_stream, HolePunch())).type == HolePunch.CONNECT
        with pytest.raises(PeerUnreachable):
            await receive(stream.muxed_stream, HolePunch())
        await check_echo(asker.link)
        assert not reached


@asynccontextmanager
async def listeners(count: int) -> AsyncIterator[tuple[set[int], Sequence[Multiaddr]]]:
    """Ports that accept every connection, and never say a word; those that were connected to are in the set."""
    reached: set[int] = set()
    opened = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(count)]
    ports = [each.socket.getsockname()[1] for each in opened]

    async def serve(listener: trio.SocketListener, port: int) -> None:
        while True:
            async with await listener.accept() as stream:
                reached.add(port)
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some():
                        pass

    async with trio.open_nursery() as nursery:
        for listener, port in zip(opened, ports, strict=True):
            nursery.start_soon(serve, listener, port)
        yield reached, [tcp_address("127.0.0.1", port) for port in ports]
        nursery.cancel_scope.cancel()
    for listener in opened:
        await listener.aclose()


@in_trio
async def test_of_many_addresses_few_are_dialled_and_who_says_nothing_there_is_given_up() -> None:
    async with asking(FEW) as asker, listeners(6) as (reached, addresses):
        await asker.ask_to_dial(*addresses, *addresses)
        first = {place[1] for place in map(host_and_port, addresses[: FEW.addresses]) if place}
        await until(lambda: reached == first)
        await until(lambda: not asker.client._puncher._dialling)
        assert reached == first
        await check_echo(asker.link)
        assert [is_relayed(each) for each in asker.client._held.living(ID.from_string(asker.link.peer))] == [True]


@in_trio
async def test_a_client_takes_part_as_often_as_its_policy_says() -> None:
    async with asking(replace(FEW, talk_s=5.0)) as asker:  # a busy machine takes a second to answer
        for _ in range(FEW.tries):
            await asker.ask_to_dial(NOWHERE)
        await asker.check_refused(framed(connect(NOWHERE)))


@in_trio
async def test_later_a_client_takes_part_again() -> None:
    async with asking(replace(FEW, again_s=0.5)) as asker:
        for _ in range(FEW.tries):
            await asker.ask_to_dial(NOWHERE)
        takes_part = False
        while not takes_part:
            with suppress(PeerUnreachable, BaseLibp2pError):
                await asker.ask_to_dial(NOWHERE)
                takes_part = True


@in_trio
async def test_a_direct_connection_that_ends_has_a_follower() -> None:
    """This happens when the other side has moved, and dials anew through the relay before its death is noticed here."""
    at_once = CircuitPolicy(punch=PunchPolicy(dial_s=1.0, grace_s=0.1, again_s=1000.0))
    async with (
        relaying() as relay,
        listening_behind(relay, policy=at_once) as server,
        echoing(server),
        dialling() as client,
    ):
        first = await client.dial(server.listening[0])
        await until(lambda: server._held.direct(peer_id(client)) is not None)
        await client._circuits.connect(parse_relay(relay.addresses[0]), peer_id(server))
        await until(lambda: len(server._held.living(peer_id(client))) == 2)
        assert not server._puncher._beginning
        with client._held.hold(client._held.living(peer_id(server))[1].muxed_conn):
            await first.end("gone")
            await first.wait_closed()
            await client._puncher.wait_direct(peer_id(server))
        assert not (await client.dial(server.addresses[0])).relayed


@in_trio
async def test_tries_in_vain_are_followed_by_others() -> None:
    punching = CircuitPolicy(punch=PunchPolicy(dial_s=1.0, again_s=0.1, longest_again_s=0.1))
    async with (
        relaying() as relay,
        listening_behind(relay, policy=punching) as server,
        echoing(server),
        dialling() as client,
    ):
        client.host.remove_stream_handler(PUNCH)
        link = await client.dial(server.addresses[0])
        await until(lambda: bool(server._puncher._beginning))
        await until(lambda: not server._puncher._beginning)
        client._puncher.start(client.host)
        await client._puncher.wait_direct(peer_id(server))
        await check_echo(link)


@in_trio
async def test_only_who_was_dialled_through_a_relay_may_ask() -> None:
    async with asking(FEW) as asker, open_network([LISTEN_ANY_LOOPBACK], POLICY) as other:
        await other.dial(asker.relay.addresses[0])
        directly = other._held.living(peer_id(asker.relay))[0]
        through = asker.client._held.living(peer_id(asker.network))[0]  # which the client has dialled itself
        for connection in (directly, through):
            await check_refused(connection, framed(connect(NOWHERE)))
        await check_echo(asker.link)


@in_trio
async def test_somebody_else_at_the_address_is_not_taken_for_the_peer() -> None:
    async with asking(FEW) as asker, open_network([LISTEN_ANY_LOOPBACK], POLICY) as other:
        place = host_and_port(other.host.get_transport_addrs()[0])
        assert place is not None
        await asker.ask_to_dial(tcp_address(*place))
        await until(lambda: not asker.client._puncher._dialling)
        await check_echo(asker.link)
        await until(lambda: other.count_open().connections == 0)
        assert asker.client._held.living(peer_id(other)) == []


@in_trio
async def test_a_client_may_leave_in_the_middle_of_it() -> None:
    async with asking(PunchPolicy(dial_s=60.0)) as asker, listeners(1) as (reached, addresses):
        await asker.ask_to_dial(*addresses)
        await until(lambda: bool(reached))


@pytest.mark.parametrize("said", [b"", b"\x05hello", b"\x10cut", framed(SYNC), framed(connect()), None], ids=repr)
@in_trio
async def test_a_client_that_answers_rubbish_or_nothing_or_knows_no_dcutr_stays_relayed(said: bytes | None) -> None:
    async with (
        relaying() as relay,
        listening_behind(relay, policy=CircuitPolicy(punch=FEW)) as server,
        echoing(server),
        dialling() as client,
    ):

        async def answer(stream: Any) -> None:
            if said:
                await stream.write(said)
            await trio.sleep_forever()

        if said is None:
            client.host.remove_stream_handler(PUNCH)
        else:
            client.host.set_stream_handler(PUNCH, answer)
        link = await client.dial(server.addresses[0])
        await until(lambda: bool(server._puncher._beginning))
        await until(lambda: not server._puncher._beginning)
        await check_echo(link)
        assert server._held.direct(peer_id(client)) is None


@pytest.mark.parametrize(
    ("host", "own", "permitted"),
    [
        ("8.8.8.8", "9.9.9.9", True),
        ("8.8.8.8", "192.168.0.2", True),
        ("8.8.8.8", "127.0.0.1", True),
        ("192.168.0.1", "9.9.9.9", False),
        ("192.168.0.1", "192.168.0.2", True),
        ("100.64.0.1", "9.9.9.9", False),
        ("127.0.0.1", "9.9.9.9", False),
        ("127.0.0.1", "192.168.0.2", False),
        ("127.0.0.1", "127.0.0.9", True),
        ("169.254.1.1", "192.168.0.2", False),
        ("169.254.1.1", "169.254.1.2", True),
        ("224.0.0.1", "9.9.9.9", False),
        ("255.255.255.255", "9.9.9.9", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("2a00::1", "2a00::2", True),
        ("2a00::1", "9.9.9.9", False),
        ("::1", "2a00::2", False),
        ("fe80::1", "2a00::2", False),
        ("fd00::1", "2a00::2", False),
        ("::ffff:127.0.0.1", "2a00::2", False),
        ("::ffff:8.8.8.8", "2a00::2", False),
    ],
)
def test_a_stranger_has_us_dial_what_is_public_or_where_we_are(host: str, own: str, permitted: bool) -> None:
    assert may_be_dialled(host, 4001, own) is permitted
    assert not may_be_dialled(host, 0, own)
