"""A relay or peer of a circuit that misbehaves: the others get one typed error, and nothing is left of the circuit."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any, cast

import pytest
import trio
import trio.testing
from libp2p.network.stream.exceptions import StreamError
from libp2p.network.stream.net_stream import NetStream
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from libp2p.stream_muxer.exceptions import MuxedStreamError

from llmnode.core.policy import LinkPolicy, RelayPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.circuit_wire import HOP, STOP, receive
from llmnode.net.host import Libp2pNetwork, open_network
from unit.circuits import (
    OTHER,
    POLICY,
    RESERVE,
    Intruder,
    check_echo,
    connect_to,
    dialling,
    echoing,
    relaying,
    reserving,
    through,
    until,
)
from unit.in_trio import in_trio

IMPATIENT_DIAL = LinkPolicy(dial_timeout_s=0.7)


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
