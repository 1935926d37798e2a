"""The round trips that it takes to agree on a connection and on a stream, and peers that do not agree."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamReset
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.exceptions import NoiseFailure
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.exceptions import MuxedStreamReset
from libp2p.transport.exceptions import SecurityUpgradeFailure
from libp2p.utils import encode_delim

from llmnode.core.policy import LinkPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.connections import open_stream
from llmnode.net.host import open_network
from llmnode.net.select import NAMES_MOST, CarefulSelect, EagerSelect, open_unanswered, proposal
from llmnode.net.yamux_stream import ProtocolRefused
from llmnode.swarm.peer_connection import open_connection
from llmnode.wire.frame import FrameType
from unit.hosts import ECHO, LOOPBACK, host, hosts, new_transport, read_exactly, tcp_pair
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from libp2p.network.swarm import Swarm

NOBODY_HAS: Any = "/nobody/1"


class CountingConnection(RawConnection):
    """Counts round trips: how often it waits for an answer to something that it has sent."""

    round_trips = 0
    _has_sent = False

    async def write(self, data: bytes) -> None:
        self._has_sent = True
        await super().write(data)

    async def read(self, n: int | None = None) -> bytes:
        self.round_trips += self._has_sent
        self._has_sent = False
        return await super().read(n)


# Connections


@pytest.mark.parametrize(("listener", "round_trips"), [("ours", 1), ("stock", 2)])
@in_trio
async def test_a_connection_takes_one_round_trip_and_another_to_who_names_no_muxer_in_the_handshake(
    listener: str, round_trips: int
) -> None:
    ours, theirs = host("ours"), host(listener)
    async with ours.run(listen_addrs=[]), theirs.run(listen_addrs=[LOOPBACK]):
        port = int(theirs.get_addrs()[0].value_for_protocol("tcp"))
        async with await trio.open_tcp_stream("127.0.0.1", port) as dialled:
            raw = CountingConnection(TrioTCPStream(dialled), True)
            upgrader = cast("Swarm", ours.get_network()).upgrader
            secured = await upgrader.upgrade_security(raw, True, theirs.get_id())
            await upgrader.upgrade_connection(secured, theirs.get_id())
            assert raw.round_trips == round_trips


@pytest.mark.parametrize(
    "answer",
    [b"\x13/multistream/1.0.0\n\x03na\n", b"SSH-2.0-OpenSSH_9.6\r\n", proposal(NOISE)[:-1] + b"\x00", b"\x00" * 99],
)
@in_trio
async def test_who_does_not_agree_to_noise_is_refused(answer: bytes) -> None:
    transport, peer = new_transport()
    async with tcp_pair() as (dialled, accepted):
        await accepted.write(answer)
        with pytest.raises(NoiseFailure, match="does not agree to Noise"):
            await transport.propose_outbound(dialled, peer)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "before it agreed"),
        (proposal(NOISE)[:7], "before it agreed"),
        (proposal(NOISE), "perhaps it has a swarm key"),
    ],
)
@in_trio
async def test_who_hangs_up_is_said_to_have_a_swarm_key_only_if_it_agreed_to_noise(answer: bytes, reason: str) -> None:
    transport, peer = new_transport()
    async with tcp_pair() as (dialled, accepted):
        await accepted.write(answer)
        await accepted.stream.stream.send_eof()
        with pytest.raises(NoiseFailure, match=reason):
            await transport.propose_outbound(dialled, peer)


@in_trio
async def test_who_says_nothing_is_not_waited_for_by_anybody() -> None:
    ours = host("ours", timeout_s=0.1)
    async with ours.run(listen_addrs=[]), tcp_pair() as (dialled, _):
        with pytest.raises(SecurityUpgradeFailure) as caught:
            await cast("Swarm", ours.get_network()).upgrader.upgrade_security(dialled, True, new_transport()[1])
        assert str(caught.value.__cause__) == "no answer in 0.1 s"


@in_trio
async def test_an_answer_may_come_byte_by_byte() -> None:
    (dialler, dialler_id), (listener, listener_id) = new_transport(), new_transport()
    async with tcp_pair() as (dialled, accepted), trio.open_nursery() as nursery:

        async def answer() -> None:
            assert await read_exactly(accepted, len(proposal(NOISE))) == proposal(NOISE)
            for byte in proposal(NOISE):
                await accepted.write(bytes([byte]))
            secured = await listener.secure_inbound(accepted)
            assert secured.get_remote_peer() == dialler_id
            assert secured.has_agreed_on_yamux

        nursery.start_soon(answer)
        secured = await dialler.propose_outbound(dialled, listener_id)
        assert secured.has_agreed_on_yamux


# Streams


@pytest.mark.parametrize("listener", ["ours", "stock"])
@in_trio
async def test_the_first_protocol_is_proposed_at_once_and_others_after_a_refusal(listener: str) -> None:
    async with hosts("ours", listener) as (ours, theirs):
        for protocols in ([ECHO], [NOBODY_HAS, ECHO], [NOBODY_HAS, NOBODY_HAS, ECHO]):
            stream = await ours.new_stream(theirs.get_id(), protocols)
            await stream.write(b"hello")
            assert await read_exactly(stream, 5) == b"hello"
        with pytest.raises(StreamFailure):
            await ours.new_stream(theirs.get_id(), [NOBODY_HAS])


@in_trio
async def test_a_protocol_takes_one_round_trip() -> None:
    async with hosts("ours", "ours") as (ours, theirs):
        stream = await ours.get_network().new_stream(theirs.get_id())
        counting = CountingConnection(stream, True)
        assert await EagerSelect().select_one_of([ECHO], MultiselectCommunicator(counting)) == ECHO
        assert counting.round_trips == 1


@pytest.mark.parametrize("listener", ["ours", "stock"])
@in_trio
async def test_what_is_written_may_go_with_the_proposal(listener: str) -> None:
    async with hosts("ours", listener) as (ours, theirs):
        stream = await open_unanswered(ours, theirs.get_id(), ECHO)
        assert stream.get_protocol() == ECHO
        await stream.write(b"hello")
        assert [await stream.read(1) for _ in range(5)] == [b"h", b"e", b"l", b"l", b"o"]
        refused = (await open_unanswered(ours, theirs.get_id(), NOBODY_HAS)).muxed_stream
        await refused.write(b"hello")
        with pytest.raises(ProtocolRefused, match=NOBODY_HAS):
            await refused.read(1)
        with pytest.raises(StreamFailure):  # and the connection lives
            await ours.new_stream(theirs.get_id(), [NOBODY_HAS])


NO_UTF_8, TOO_LONG = b"\x02\xff\n", b"\xff\x7f" + bytes(1 << 15)
NO_NAMES = [NO_UTF_8, proposal(ECHO)[:20] + NO_UTF_8, b"\xff" * 11, b"\x00", b"\x05hello", TOO_LONG]


async def read_to_its_end(stream: Any) -> None:
    while await stream.read():
        pass


@pytest.mark.parametrize("noise", NO_NAMES)
@in_trio
async def test_what_is_no_name_ends_a_stream_or_a_connection_and_not_the_node(noise: bytes) -> None:
    async with hosts("ours", "ours") as (ours, theirs):
        stream = (await ours.get_network().new_stream(theirs.get_id())).muxed_stream
        await stream.write(noise)
        with pytest.raises(MuxedStreamReset):
            await read_to_its_end(stream)
        port = int(theirs.get_addrs()[0].value_for_protocol("tcp"))
        async with await trio.open_tcp_stream("127.0.0.1", port) as stranger:
            await stranger.send_all(noise)
            await stranger.send_eof()
            with suppress(trio.BrokenResourceError):  # or it is reset
                while await stranger.receive_some():
                    pass
        stream = await ours.new_stream(theirs.get_id(), [ECHO])
        await stream.write(b"hello")
        assert await read_exactly(stream, 5) == b"hello"


@pytest.mark.parametrize("noise", NO_NAMES)
@in_trio
async def test_an_answer_that_is_no_name_is_a_typed_failure(noise: bytes) -> None:
    async with hosts("ours", "ours") as (ours, theirs):

        async def answer(stream: Any) -> None:
            await stream.read(1)
            await stream.write(noise)
            await stream.close()

        theirs.get_network().set_stream_handler(answer)
        with pytest.raises(StreamFailure):
            await ours.new_stream(theirs.get_id(), [ECHO])
        (connection,) = ours.get_network().get_connections(theirs.get_id())
        with pytest.raises(MultiselectClientError):
            await open_stream(connection, ECHO, 5)


class Claimant:
    """Announces a name of 256 MiB, and fails if somebody reads on."""

    def __init__(self) -> None:
        self.left = bytearray(b"\xff\xff\xff\x7f")

    async def write(self, data: bytes) -> None:
        assert data

    async def read(self, n: int) -> bytes:
        assert self.left, f"{n} bytes of a name are asked for"
        taken, self.left = self.left[:n], self.left[n:]
        return bytes(taken)


@in_trio
async def test_no_more_of_a_long_name_is_read_than_its_length() -> None:
    with pytest.raises(MultiselectClientError, match="exceeds"):
        await EagerSelect().select_one_of([ECHO], MultiselectCommunicator(cast("Any", Claimant())))
    with pytest.raises(MultiselectError):
        await CarefulSelect({ECHO: None}).negotiate(MultiselectCommunicator(cast("Any", Claimant())))


class Asking:
    """Asks for protocols without end, and counts the answers."""

    def __init__(self, name: str) -> None:
        self.answers = 0
        self._begins, self._name = encode_delim(b"/multistream/1.0.0"), encode_delim(name.encode())
        self._unread = b""

    async def read(self, count: int) -> bytes:
        if not self._unread:
            self._unread, self._begins = self._begins or self._name, b""
        data, self._unread = self._unread[:count], self._unread[count:]
        return data

    async def write(self, _data: bytes) -> None:
        self.answers += 1
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("name", ["nobody has it", "ls"])
@in_trio
async def test_names_without_end_are_answered_some_times(name: str) -> None:
    asking = Asking(name)
    with trio.fail_after(2), pytest.raises(MultiselectError):
        await CarefulSelect({ECHO: None}).negotiate(MultiselectCommunicator(cast("Any", asking)))
    assert asking.answers == NAMES_MOST


@in_trio
async def test_what_nobody_foresaw_ends_its_stream_and_not_the_node() -> None:
    async def fail(stream: Any) -> None:
        await stream.read(1)
        raise ZeroDivisionError("by a handler")

    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network, open_network([], LinkPolicy()) as other:
        network.host.set_stream_handler(NOBODY_HAS, fail)
        other.vouch(network.addresses)
        await other.host.connect(parse_peer(network.addresses[0]))
        stream = await other.host.new_stream(network.host.get_id(), [NOBODY_HAS])
        await stream.write(b"1")
        with pytest.raises(StreamReset):
            await stream.read(1)
        assert not (await other.dial(network.addresses[0])).has_ended


@in_trio
async def test_who_refuses_by_a_reset_is_said_to_refuse_whatever_we_write() -> None:
    """go-libp2p and rust-libp2p do so: they take what follows the refused proposal for another, which it is not."""
    theirs = host("ours")
    async with theirs.run(listen_addrs=[LOOPBACK]), open_network([], LinkPolicy()) as network:

        async def refuse(stream: Any) -> None:
            muxed = stream.muxed_stream
            await muxed.read(1)
            muxed.write_at_once(proposal(ECHO)[:20] + b"\x03na\n")
            await muxed.reset()

        theirs.get_network().set_stream_handler(refuse)
        async with open_connection(await network.dial(str(theirs.get_addrs()[0]))) as connection:
            with pytest.raises(PeerUnreachable, match="refuses a link"):
                await connection.ask_peer(FrameType.DESCRIBE, FrameType.DESCRIPTION, 5, payload=bytes(1 << 17))


@in_trio
async def test_who_has_no_links_is_said_to_be_no_node() -> None:
    theirs = host("stock")
    async with theirs.run(listen_addrs=[LOOPBACK]), open_network([], LinkPolicy()) as network:
        link = await network.dial(str(theirs.get_addrs()[0]))
        with pytest.raises(PeerUnreachable, match="is no node of llmnode") as caught:
            await link.receive()
        assert caught.value.peer == theirs.get_id().to_base58()
        another = ID.from_pubkey(create_new_key_pair().public_key)
        with pytest.raises(PeerUnreachable, match="answers, not"):
            await network.dial(str(theirs.get_addrs()[0]).replace(theirs.get_id().to_base58(), another.to_base58()))
