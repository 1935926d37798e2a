"""Circuits over real libp2p hosts on loopback: a relay, a peer that reserves there, and others that dial it.

If a relay or peer misbehaves, the other ends of a circuit get one typed error, and nothing is left of it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamError
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError

from llmnode.core.budget import Kind, Resource
from llmnode.core.policy import BudgetPolicy, CircuitPolicy, LinkPolicy, PunchPolicy, RelayPolicy
from llmnode.errors import ConfigError, PeerError, PeerUnreachable, single_error
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer, parse_relay, relay_of, tcp_address
from llmnode.net.circuit_splice import LEAST_PIECE_BYTES, Splices
from llmnode.net.circuit_wire import HOP, PIECE_BYTES, STOP, receive, send
from llmnode.net.host import Libp2pNetwork, OpenCounts, open_network
from llmnode.net.link import Libp2pLink
from llmnode.net.punch import Door
from llmnode.testing import simulated
from llmnode.wire.frame import Frame, FrameType
from unit.in_trio import in_trio

POLICY = LinkPolicy()
IMPATIENT = LinkPolicy(heartbeat_s=0.05, silence_s=0.5)
EAGER = CircuitPolicy(retry_s=0.05, renew_least_s=0.05, punch=PunchPolicy(tries=0))
MEGABYTE = 1 << 20
PIECE = 10_000
OTHER_ID = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
RELAY_ID = "12D3KooWT1zLoHvuZuAgjW6GBSaHgLZvV3Xvfae9tjPBCti1c7vh"
OTHER = f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER_ID}"
IMPATIENT_DIAL = LinkPolicy(dial_timeout_s=0.7)


def relaying(
    policy: RelayPolicy | None = None, *, identity: bytes | None = None, listen: str = LISTEN_ANY_LOOPBACK
) -> Any:
    return open_network([listen], POLICY, identity, relay_policy=policy or RelayPolicy())


def reserving(*relays: Libp2pNetwork, link: LinkPolicy = POLICY) -> Any:
    """A peer that listens nowhere."""
    at = [each.addresses[0] for each in relays]
    return open_network([], link, relays=at, circuit_policy=EAGER)


def listening_behind(*relays: Libp2pNetwork, policy: CircuitPolicy = EAGER) -> Any:
    """A peer that listens, and says only through which relays it is reached."""
    return open_network(
        [LISTEN_ANY_LOOPBACK], POLICY, relays=[each.addresses[0] for each in relays], circuit_policy=policy
    )


def dialling(link: LinkPolicy = POLICY) -> Any:
    return open_network([], link)


def through(relay: Libp2pNetwork, peer: Libp2pNetwork) -> str:
    return f"{relay.addresses[0]}/p2p-circuit/p2p/{peer.peer}"


@asynccontextmanager
async def mortal(network: Any) -> AsyncIterator[tuple[Libp2pNetwork, Callable[[], Awaitable[None]]]]:
    """A network, and what ends it before the context does."""
    stop, stopped = trio.Event(), trio.Event()

    async def live(task_status: trio.TaskStatus[Libp2pNetwork]) -> None:
        async with network as opened:
            task_status.started(opened)
            await stop.wait()
        stopped.set()

    async def kill() -> None:
        stop.set()
        await stopped.wait()

    async with trio.open_nursery() as nursery:
        yield await nursery.start(live), kill
        stop.set()


@asynccontextmanager
async def echoing(network: Libp2pNetwork) -> AsyncIterator[None]:
    """Sends each frame back to every peer that dials."""

    async def echo(task_status: trio.TaskStatus[None]) -> None:
        async with network.accept() as link:
            task_status.started()
            with suppress(PeerError):
                while True:
                    await link.send(await link.receive())

    async def serve() -> None:
        while True:
            await nursery.start(echo)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield
        nursery.cancel_scope.cancel()


def frame(payload: bytes, step: int = 0) -> Frame:
    return Frame(FrameType.RESULT, step=step, payload=payload)  # type: ignore[arg-type]  # any number will do


async def until(holds: Callable[[], bool]) -> None:
    """Other tasks' work on sockets has no event of its own here; the test's deadline ends this."""
    while not holds():  # noqa: ASYNC110
        await trio.sleep(0.005)


@asynccontextmanager
async def noting(network: Libp2pNetwork) -> AsyncIterator[list[list[str]]]:
    """The addresses that it has one after the other."""
    told: list[list[str]] = []

    async def note() -> None:
        while True:
            await network.wait_addresses_changed()
            told.append(network.addresses)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(note)
        yield told
        nursery.cancel_scope.cancel()


def nothing_of(network: Libp2pNetwork) -> bool:
    counts = network.count_open()
    return not (counts.circuits or counts.reservations or counts.links)


async def check_echo(link: Libp2pLink, size: int = 1000) -> None:
    sent = secrets.token_bytes(size)
    await link.send(frame(sent))
    assert bytes((await link.receive()).payload) == sent


@in_trio
async def test_who_cannot_be_dialled_is_reached_through_a_relay() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        assert server.addresses == [through(relay, server)]
        link = await client.dial(server.addresses[0])
        assert link.peer == server.peer
        assert link.relayed
        assert link.group == "127.0.0.1", "it counts as one that is at the relay"
        assert link.relay_limit_bytes == RelayPolicy().circuit_bytes
        await check_echo(link)
        await until(lambda: server.count_open().relayed == 1)
        assert relay.count_open() == OpenCounts(
            links=0, relayed=0, circuits=1, reservations=1, connections=2, streams=relay.count_open().streams
        )


@in_trio
async def test_through_a_relay_that_is_named_by_dns_it_is_reached_at_an_ip_address_too() -> None:
    """Others dial no names that they have heard from strangers."""
    async with relaying() as relay:
        named = relay.addresses[0].replace("/ip4/127.0.0.1/", "/dns4/localhost/")
        async with open_network([], POLICY, relays=[named], circuit_policy=EAGER) as server, echoing(server):
            name, ip = server.addresses
            assert (name, ip) == (f"{named}/p2p-circuit/p2p/{server.peer}", through(relay, server))
            async with dialling() as client:
                client.vouch(relay.addresses)
                with pytest.raises(PeerUnreachable, match="strangers name addresses of IP"):
                    await client.dial(name, is_heard=True)
                await check_echo(await client.dial(ip, is_heard=True))


@in_trio
async def test_megabytes_pass_both_ways_at_once() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        link = await client.dial(server.addresses[0])
        sent = [random.Random(number).randbytes(MEGABYTE) for number in range(24)]

        async def send_all() -> None:
            for number, payload in enumerate(sent):
                await link.send(frame(payload, number))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            for payload in sent:
                assert bytes((await link.receive()).payload) == payload


@in_trio
async def test_several_dial_through_one_relay_and_one_dials_several() -> None:
    async with (
        relaying() as relay,
        reserving(relay) as one,
        echoing(one),
        reserving(relay) as other,
        echoing(other),
        dialling() as first,
        dialling() as second,
    ):
        links = [await client.dial(server.addresses[0]) for client in (first, second) for server in (one, other)]
        for link in links:
            await check_echo(link)
        assert relay.count_open().circuits == 4
        assert first.count_open().connections == 3, "the connection to the relay is shared"


@in_trio
async def test_those_who_reserve_at_the_same_relay_reach_each_other_and_the_relay_them() -> None:
    async with relaying() as relay, reserving(relay) as one, reserving(relay) as other, echoing(other):
        await check_echo(await one.dial(other.addresses[0]))
        link = await relay.dial(other.addresses[0])  # over the connection that the reservation is held by
        assert not link.relayed
        assert link.relay_limit_bytes is None
        await check_echo(link)
        await link.end("done")
        await link.wait_closed()
        assert relay.count_open().reservations == 2, "a link that ends does not end the reservation"


@in_trio
async def test_a_link_that_ends_leaves_nothing_anywhere() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        at_rest = server.count_open().connections
        for _ in range(3):
            link = await client.dial(server.addresses[0])
            await check_echo(link)
            await link.end("done")
            await until(lambda: client.count_open().connections == 0)  # to the relay, too
            await until(lambda: relay.count_open().circuits == 0)
            await until(lambda: server.count_open().connections == at_rest)
            await until(lambda: server.count_open().links == 0)
        assert relay.count_open().reservations == 1
        await until(lambda: relay.count_open().connections == 1)
        await until(lambda: server.count_open().streams == relay.count_open().streams == 1)  # the pings


@in_trio
async def test_the_link_to_a_relay_may_end_while_a_circuit_goes_through_it() -> None:
    async with relaying() as relay, echoing(relay), reserving(relay) as server, echoing(server), dialling() as client:
        to_relay = await client.dial(relay.addresses[0])
        link = await client.dial(server.addresses[0])
        await to_relay.end("done")
        await to_relay.wait_closed()
        await check_echo(link)
        await link.end("done")
        await until(lambda: client.count_open().connections == 0)


@in_trio
async def test_a_server_that_dies_ends_its_circuits_and_its_reservation() -> None:
    async with relaying() as relay, dialling() as client:
        async with reserving(relay) as server, echoing(server):
            address = server.addresses[0]
            link = await client.dial(address)
            await check_echo(link)
        with pytest.raises(PeerUnreachable):
            await link.receive()
        await until(lambda: nothing_of(relay))
        with pytest.raises(PeerUnreachable, match="no reservation at the relay"):
            await client.dial(address)
        await until(lambda: client.count_open().connections == 0)


@in_trio
async def test_a_relay_that_dies_ends_the_links_through_it_and_is_used_again_when_it_is_back() -> None:
    key = secrets.token_bytes(32)
    async with (
        relaying() as stays,
        mortal(relaying(identity=key)) as (dies, kill),
        reserving(stays, dies) as server,
        echoing(server),
        dialling() as client,
    ):
        place = dies.addresses[0].partition("/p2p/")[0]
        assert server.addresses == [through(stays, server), through(dies, server)]
        link = await client.dial(through(dies, server))
        await check_echo(link)
        await kill()
        with pytest.raises(PeerUnreachable):
            await link.receive()
        await until(lambda: server.addresses == [through(stays, server)])
        await check_echo(await client.dial(through(stays, server)))
        async with noting(server) as told, relaying(identity=key, listen=place) as back:
            await until(lambda: bool(told))
            assert told == [[through(stays, server), through(back, server)]]


class Intruder:
    """A host that speaks libp2p, and what it likes in circuits. `network` is what it is inside."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self.network = network

    async def open(self, other: Libp2pNetwork, protocol: TProtocol) -> NetStream:
        info = parse_peer(other.addresses[0])
        self.network.vouch(other.addresses[:1])
        await self.network.host.connect(info)
        return cast(NetStream, await self.network.host.new_stream(info.peer_id, [protocol]))

    async def ask(self, relay: Libp2pNetwork, request: pb.HopMessage) -> pb.HopMessage:
        stream = await self.open(relay, HOP)
        await send(stream.muxed_stream, request)
        return await receive(stream.muxed_stream, pb.HopMessage())


def connect_to(peer: bytes) -> pb.HopMessage:
    return pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer))


RESERVE = pb.HopMessage(type=pb.HopMessage.RESERVE)


@in_trio
async def test_a_relay_answers_whatever_it_is_asked_with_a_status_and_goes_on() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as network:
        intruder = Intruder(network)
        for request, status in [
            (connect_to(b"\0" * 34), pb.NO_RESERVATION),
            (connect_to(b""), pb.MALFORMED_MESSAGE),
            (connect_to(b"\0" * 1000), pb.MALFORMED_MESSAGE),
            (pb.HopMessage(), pb.MALFORMED_MESSAGE),
            (pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK), pb.UNEXPECTED_MESSAGE),
        ]:
            answer = await intruder.ask(relay, request)
            assert (answer.type, answer.status) == (pb.HopMessage.STATUS, status)
        for garbage in (b"\x05hello", b"\xff\xff\xff\xff\xff", bytes([0x81, 0x80, 0x02]), b"\x80\x80\x80\x80"):
            stream = await intruder.open(relay, HOP)
            await stream.write(garbage)
            assert (await receive(stream.muxed_stream, pb.HopMessage())).status == pb.MALFORMED_MESSAGE
        for cut in (b"", b"\x10abc"):
            stream = await intruder.open(relay, HOP)
            await stream.write(cut)
            await stream.close_write()
            with pytest.raises(PeerUnreachable):
                await receive(stream.muxed_stream, pb.HopMessage())
        await check_echo(await network.dial(server.addresses[0]))


@in_trio
async def test_who_begins_a_request_and_does_not_end_it_is_not_waited_for() -> None:
    async with relaying(RelayPolicy(handshake_s=0.1)) as relay, dialling() as network:
        stream = await Intruder(network).open(relay, HOP)
        await stream.write(b"\x10abc")
        with pytest.raises(PeerUnreachable):
            await receive(stream.muxed_stream, pb.HopMessage())


@in_trio
async def test_a_peer_that_takes_no_circuit_is_refused_for_and_the_relay_does_not_wait_for_it() -> None:
    async with relaying(RelayPolicy(handshake_s=0.4)) as relay, dialling() as network, dialling() as client:
        intruder = Intruder(network)
        assert (await intruder.ask(relay, RESERVE)).status == pb.OK
        address = through(relay, network)
        with pytest.raises(PeerUnreachable, match="cannot reach it, or it refuses"):  # it does not know the protocol
            await client.dial(address)
        answers: list[bytes] = []

        async def answer(stream: Any) -> None:
            await stream.write(answers.pop(0))
            await trio.sleep_forever()

        network.host.set_stream_handler(STOP, answer)
        refused = pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.PERMISSION_DENIED).SerializeToString()
        for said in (bytes([len(refused)]) + refused, b"\x05hello", b"\xff\xff\xff", b"", b"\x02"):
            answers.append(said)
            with pytest.raises(PeerUnreachable, match="cannot reach it, or it refuses"):
                await client.dial(address)
        assert not answers
        await until(lambda: relay.count_open().circuits == 0)


@in_trio
async def test_a_peer_takes_no_circuit_from_who_is_not_its_relay_and_survives_what_a_relay_sends() -> None:
    async with relaying() as relay, reserving(relay) as server, echoing(server), dialling() as client:
        outsider = await client.dial(server.addresses[0])  # a connection to the server; its relay it is not
        info = parse_peer(server.addresses[0])

        async def stop_from(network: Libp2pNetwork, said: bytes) -> pb.StopMessage:
            stream = cast(NetStream, await network.host.new_stream(info.peer_id, [STOP]))
            await stream.write(said)
            return await receive(stream.muxed_stream, pb.StopMessage())

        def message(**fields: Any) -> bytes:
            body = pb.StopMessage(**fields).SerializeToString()
            return bytes([len(body)]) + body

        call = message(type=pb.StopMessage.CONNECT, peer=pb.PeerId(id=b"\0" * 34))
        assert (await stop_from(client, call)).status == pb.PERMISSION_DENIED
        for said, status in [
            (message(), pb.MALFORMED_MESSAGE),
            (message(type=pb.StopMessage.CONNECT), pb.MALFORMED_MESSAGE),
            (message(type=pb.StopMessage.STATUS, peer=pb.PeerId(id=b"x")), pb.UNEXPECTED_MESSAGE),
            (b"\x05hello", pb.MALFORMED_MESSAGE),
            (b"\xff\xff\xff", pb.MALFORMED_MESSAGE),
        ]:
            assert (await stop_from(relay, said)).status == status
        for noise in (b"", b"no multistream", secrets.token_bytes(70_000)):
            stream = cast(NetStream, await relay.host.new_stream(info.peer_id, [STOP]))
            await stream.write(call)
            assert (await receive(stream.muxed_stream, pb.StopMessage())).status == pb.OK
            with suppress(StreamError):
                await stream.write(noise)
            await stream.close_write()
            with suppress(MuxedStreamError):
                while await stream.muxed_stream.read():
                    pass
        await check_echo(outsider)
        async with dialling() as newcomer:
            await check_echo(await newcomer.dial(server.addresses[0]))


@in_trio
async def test_what_a_hostile_relay_answers_ends_a_dial_with_one_error() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as relay, dialling(IMPATIENT_DIAL) as client:
        answers: list[bytes] = []

        async def answer(stream: Any) -> None:
            await stream.write(answers.pop(0))

        relay.host.set_stream_handler(HOP, answer)
        ok = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK).SerializeToString()
        unknown = pb.HopMessage(type=pb.HopMessage.STATUS, status=299).SerializeToString()  # type: ignore[arg-type]
        for said, matching in [
            (b"\x05hello", "breaks the protocol"),
            (b"\xff\xff\xff", "breaks the protocol"),
            (b"\x00", "breaks the protocol"),
            (bytes([len(unknown)]) + unknown, "status 299"),
            (bytes([len(ok)]) + ok + b"\x05who?\n", "cannot connect"),
            (bytes([len(ok)]) + ok, "no answer"),
            (b"", "no answer"),
        ]:
            answers.append(said)
            with pytest.raises(PeerUnreachable, match=matching):
                await client.dial(f"{relay.addresses[0]}/p2p-circuit/p2p/{parse_peer(OTHER).peer_id}")
            await until(lambda: client.count_open().connections == 0)


@in_trio
async def test_a_relay_that_puts_another_peer_through_is_found_out() -> None:
    async with relaying() as relay, reserving(relay) as liar, dialling() as client:
        honest = relay.host.get_mux().handlers[HOP]

        async def swap(stream: Any) -> None:
            read = stream.muxed_stream.read
            swapped = connect_to(parse_peer(liar.addresses[0]).peer_id.to_bytes()).SerializeToString()
            await receive(stream.muxed_stream, pb.HopMessage())
            left = bytearray(bytes([len(swapped)]) + swapped)

            async def reread(n: int | None = None) -> bytes:
                if not left:
                    return cast(bytes, await read(n))
                taken = bytes(left[:n])
                del left[:n]
                return taken

            stream.muxed_stream.read = reread
            assert honest is not None
            await honest(stream)

        relay.host.set_stream_handler(HOP, swap)
        with pytest.raises(PeerUnreachable, match="answers, not"):
            await client.dial(f"{relay.addresses[0]}/p2p-circuit/p2p/{parse_peer(OTHER).peer_id}")
        await until(lambda: not liar.count_open().links and not relay.count_open().circuits)


@in_trio
async def test_a_relay_grants_no_more_than_its_policy() -> None:
    tight = RelayPolicy(reservations=2, circuits=2, circuits_per_peer=1)
    async with relaying(tight) as relay, reserving(relay) as one, reserving(relay) as other:
        with pytest.raises(PeerUnreachable, match="the relay is full"), single_error():
            async with reserving(relay):
                pass
        async with dialling() as first, dialling() as second, dialling() as third, echoing(one), echoing(other):
            link = await first.dial(one.addresses[0])
            with pytest.raises(PeerUnreachable, match="the relay is full"):  # for the dialled peer
                await second.dial(one.addresses[0])
            with pytest.raises(PeerUnreachable, match="the relay is full"):  # and for the dialling peer
                await first.dial(other.addresses[0])
            await check_echo(await second.dial(other.addresses[0]))
            await link.end("done")
            await until(lambda: relay.count_open().circuits == 1)
            await check_echo(await third.dial(one.addresses[0]))


@in_trio
async def test_the_nodes_at_one_host_get_their_share_of_a_relay() -> None:
    async with relaying(RelayPolicy(reservations_per_host=1)) as relay, reserving(relay) as server:
        with pytest.raises(PeerUnreachable, match="the relay is full"), single_error():
            async with reserving(relay):
                pass
        answer = await Intruder(server).ask(relay, RESERVE)  # its own again
        assert answer.status == pb.OK


@in_trio
async def test_a_relay_does_not_take_all_connections_of_a_peer() -> None:
    few = replace(POLICY, budget=BudgetPolicy(connections_per_host=1))
    async with (
        relaying() as relay,
        relaying(listen="/ip4/127.0.0.2/tcp/0") as other,
        reserving(relay, other, link=few) as server,
        echoing(server),
        dialling() as first,
        dialling() as second,
    ):
        link = await first.dial(through(relay, server))
        with pytest.raises(PeerUnreachable):
            await second.dial(through(relay, server))
        await check_echo(await second.dial(through(other, server)))
        await check_echo(link)


async def keep_talking(link: Libp2pLink, size: int) -> None:
    while True:
        await check_echo(link, size)


@in_trio
async def test_a_circuit_that_carries_too_much_or_lives_too_long_is_cut() -> None:
    for policy, cut_by in ((RelayPolicy(circuit_bytes=50_000), 40_000), (RelayPolicy(circuit_s=1.0), 1)):
        async with relaying(policy) as relay, reserving(relay) as server, echoing(server), dialling() as client:
            link = await client.dial(server.addresses[0])
            await check_echo(link)
            with pytest.raises(PeerUnreachable):
                await keep_talking(link, cut_by)
            await until(lambda: relay.count_open().circuits == 0 and server.count_open().links == 0)


@in_trio
async def test_a_reservation_that_is_not_renewed_ends_and_one_that_is_stays() -> None:
    async with relaying(RelayPolicy(reservation_s=2.0)) as relay, dialling() as network, dialling() as client:
        assert (await Intruder(network).ask(relay, RESERVE)).status == pb.OK
        assert relay.count_open().reservations == 1
        await until(lambda: relay.count_open().reservations == 0)
        with pytest.raises(PeerUnreachable, match="no reservation at the relay"):
            await client.dial(through(relay, network))
        async with reserving(relay) as server, echoing(server):
            lived = trio.current_time()
            await until(lambda: trio.current_time() > lived + 5.0)  # two lives and a half
            assert relay.count_open().reservations == 1
            await check_echo(await client.dial(server.addresses[0]))


@in_trio
async def test_links_end_when_a_relay_falls_silent() -> None:
    async with (
        relaying() as relay,
        reserving(relay, link=IMPATIENT) as server,
        echoing(server),
        dialling(IMPATIENT) as client,
    ):
        link = await client.dial(server.addresses[0])
        await check_echo(link)
        async with noting(server) as told:
            freeze(relay)
            with pytest.raises(PeerUnreachable):
                await link.receive()
            await until(lambda: client.count_open().connections == 0)
            await until(lambda: len(told) == 2)
            assert told == [[], [through(relay, server)]], "over another connection, which is not frozen"


def freeze(network: Libp2pNetwork) -> None:
    """Have its connections neither send nor say that they do not, as if it were cut off."""
    for connection in cast(Any, network.host.get_network()).get_connections():
        muxed = connection.muxed_conn
        muxed.machine = muxed.sender.machine = Mute(muxed.machine)
        for stream in muxed._streams.values():
            stream._machine = muxed.machine


class Mute:
    """A protocol machine that lets nothing out and nothing in."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def receive(self, data: Any) -> Any:
        return ([], [], [], [])

    def seal_output(self) -> bytes:
        return b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)


@in_trio
async def test_a_circuit_that_carries_nothing_is_closed() -> None:
    """One that carries heartbeats alone is not."""
    impatient = RelayPolicy(circuit_idle_s=0.3)
    async with relaying(impatient) as relay, reserving(relay, link=IMPATIENT) as server, echoing(server):
        async with open_network([], IMPATIENT) as client:
            link = await client.dial(through(relay, server))
            await trio.sleep(0.8)
            assert not link.has_ended and relay.count_open().circuits == 1
        async with dialling() as silent:
            request = connect_to(parse_peer(through(relay, server)).peer_id.to_bytes())
            assert (await Intruder(silent).ask(relay, request)).status == pb.OK
            await until(lambda: relay.count_open().circuits == 0)


@in_trio
async def test_an_address_group_has_a_share_of_the_circuits_whatever_its_identities() -> None:
    few = RelayPolicy(circuits_per_group=2)
    async with relaying(few) as relay, reserving(relay) as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(dialling()) for _ in range(3)]
        for client in clients[:2]:
            await client.dial(through(relay, server))
        with pytest.raises(PeerUnreachable, match="the relay is full"):
            await clients[2].dial(through(relay, server))


@in_trio
async def test_circuits_are_in_the_budget_of_their_relay_and_leave_nothing() -> None:
    async with relaying() as relay, reserving(relay) as server:
        held = relay.budget.process.held
        async with dialling() as client:
            await client.dial(through(relay, server))
            circuits = list(relay.budget.process.within(Kind.SESSION))
            assert [each.held[Resource.MEMORY] for each in circuits] == [2 * PIECE_BYTES]
        await until(lambda: relay.count_open().circuits == 0)
        assert not list(relay.budget.process.within(Kind.SESSION))
        assert held[Resource.MEMORY] < MEGABYTE


@in_trio
async def test_a_relay_without_memory_refuses_circuits() -> None:
    async with relaying() as relay, reserving(relay) as server, dialling() as client:
        process = relay.budget.process
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY] + LEAST_PIECE_BYTES)
        with pytest.raises(PeerUnreachable):
            await client.dial(through(relay, server))
        assert not relay.count_open().circuits


@in_trio
async def test_many_relays_of_one_machine_are_one_address_group() -> None:
    async with relaying() as one, relaying() as another, reserving(one, another) as server, dialling() as client:
        for relay in (one, another):
            await client.dial(through(relay, server))
        for network in (client, server):
            assert {each.name for each in network.budget.process.within(Kind.GROUP)} == {"127.0.0.1"}


@in_trio
async def test_two_peers_punch_where_their_relay_sees_them_and_nowhere_else() -> None:
    async with relaying() as relay, reserving(relay) as server, dialling() as client:
        await client.dial(through(relay, server))
        for network, other in ((client, server), (server, client)):
            (relayed,) = network._held.living(ID.from_string(other.peer))
            circuit = cast(Any, relayed).muxed_conn.secured_conn.raw
            assert circuit.seen_host == "127.0.0.1"
            places = [("8.8.8.8", 1), ("127.0.0.2", 2), ("127.0.0.1", 3), ("8.8.8.8", 4)]
            named = [tcp_address(*place).to_bytes() for place in places]
            door = Door("127.0.0.1", 5, "127.0.0.1", 5)
            assert network._puncher._permitted(named, door, relayed) == [("127.0.0.1", 3)]
            circuit.seen_host = None  # as with other relays than ours
            assert network._puncher._permitted(named, door, relayed) == [("8.8.8.8", 1), ("8.8.8.8", 4)]


class Sink:
    """Takes what is written to it over a line of its own, or one that it shares with others."""

    def __init__(self, line: trio.Lock) -> None:
        self.moved_bytes = 0
        self.line = line

    async def read(self, _most: int) -> bytes:
        await trio.sleep_forever()
        return b""

    async def write(self, data: bytes) -> None:
        async with self.line:
            await trio.sleep(0.001)
        self.moved_bytes += len(data)


@simulated
async def test_a_group_with_many_circuits_moves_no_more_than_one_with_a_single_circuit() -> None:
    line = trio.Lock()
    one, many = Sink(line), [Sink(line) for _ in range(20)]
    await move({("one", "peer"): [one], ("many", "peer"): many}, 4)
    assert one.moved_bytes == pytest.approx(sum(each.moved_bytes for each in many), rel=0.15)
    assert min(each.moved_bytes for each in many) > 0


@simulated
async def test_a_peer_with_many_circuits_moves_no_more_than_another_one_of_its_group() -> None:
    line = trio.Lock()
    one, many = Sink(line), [Sink(line) for _ in range(20)]
    await move({("group", "one"): [one], ("group", "many"): many}, 4)
    assert one.moved_bytes == pytest.approx(sum(each.moved_bytes for each in many), rel=0.15)


@simulated
async def test_circuits_whose_far_side_takes_nothing_keep_nobody_waiting() -> None:
    one, stuck = Sink(trio.Lock()), [Sink(trio.Lock()) for _ in range(20)]
    for each in stuck:
        await each.line.acquire()
    await move({("one", "peer"): [one], ("stuck", "peer"): stuck}, 1)
    assert one.moved_bytes > 800 * PIECE
    assert not any(each.moved_bytes for each in stuck)


async def move(sinks: dict[tuple[str, str], list[Sink]], for_s: float) -> None:
    """Through one relay, to each sink of a peer in an address group, as much as it takes."""
    splices = Splices(RelayPolicy())
    async with trio.open_nursery() as nursery:
        for path, members in sinks.items():
            for sink in members:
                nursery.start_soon(splices.splice, Flood(), sink, path, PIECE)
        await trio.sleep(for_s)
        nursery.cancel_scope.cancel()


class Flood:
    """Sends for ever."""

    async def read(self, _most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(PIECE)


@in_trio
async def test_a_splice_ends_each_direction_on_its_own() -> None:
    async with relaying() as near, dialling() as far:
        opened: list[NetStream] = []
        both = trio.Event()

        async def take(stream: Any) -> None:
            opened.append(stream)
            if len(opened) == 2:
                both.set()
            await trio.sleep_forever()

        near.host.set_stream_handler(TProtocol("/half"), take)
        intruder = Intruder(far)
        one, other = [await intruder.open(near, TProtocol("/half")) for _ in range(2)]
        await both.wait()
        in_order: list[bool] = []
        splices = Splices(RelayPolicy(circuit_bytes=MEGABYTE))

        async def run() -> None:
            in_order.append(
                await splices.splice(opened[0].muxed_stream, opened[1].muxed_stream, ("group", "peer"), MEGABYTE)
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await one.write(b"question")
            await one.close_write()
            assert await other.read(100) == b"question"
            with pytest.raises(MuxedStreamEOF):
                await other.muxed_stream.read(100)
            await other.write(b"answer")
            assert await one.read(100) == b"answer"
            await other.close_write()
            with pytest.raises(MuxedStreamEOF):
                await one.muxed_stream.read(100)
        assert in_order == [True]


@pytest.mark.parametrize(
    ("address", "matching"),
    [
        (f"/p2p-circuit/p2p/{OTHER_ID}", "one relay"),
        (f"/ip4/127.0.0.1/tcp/1/p2p-circuit/p2p/{OTHER_ID}", "is not the address of a peer"),
        (f"{OTHER}/p2p-circuit", "is not the address of a peer"),
        (f"{OTHER}/p2p-circuit/p2p/{OTHER_ID}/p2p-circuit/p2p/{OTHER_ID}", "one relay"),
    ],
)
def test_an_address_that_names_no_relay_is_refused(address: str, matching: str) -> None:
    with pytest.raises(ConfigError, match=matching):
        parse_peer(address)


def test_a_circuit_address_is_that_of_its_peer() -> None:
    info = parse_peer(f"{OTHER}/p2p-circuit/p2p/{RELAY_ID}")
    relay = relay_of(info)
    assert info.peer_id.to_base58() == RELAY_ID
    assert relay is not None and relay.peer_id.to_base58() == OTHER_ID
    assert relay_of(parse_peer(OTHER)) is None
    with pytest.raises(ConfigError, match="itself reached through a relay"):
        parse_relay(f"{OTHER}/p2p-circuit/p2p/{RELAY_ID}")
    with pytest.raises(ConfigError, match="characters"):
        parse_relay(f"/dns/{'.'.join(['a' * 60] * 4)}/tcp/4001/p2p/{RELAY_ID}")


@in_trio
async def test_a_relay_that_cannot_be_reached_is_named() -> None:
    with (
        pytest.raises(PeerUnreachable, match=r"cannot connect to the relay at /ip4/127\.0\.0\.1/tcp/1 .*refused"),
        single_error(),
    ):
        async with open_network([], POLICY, relays=[OTHER]):
            pass
    async with dialling() as client:
        with pytest.raises(PeerUnreachable, match="cannot connect to the relay at"):
            await client.dial(f"{OTHER}/p2p-circuit/p2p/{RELAY_ID}")
    async with relaying() as relay, open_network([], POLICY, relays=[OTHER, relay.addresses[0]]) as server:
        assert server.addresses == [through(relay, server)], "one relay is enough"
