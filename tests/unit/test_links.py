"""Links, connections and the server over real libp2p hosts in one process, with a worker that needs no torch.

Whatever a peer sends, or fails to send, ends as one typed error at its own link; the server serves on and keeps
nothing of it.
"""

from __future__ import annotations

import random
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr

from llmnode.client.connection import Connection, open_connection
from llmnode.client.pool import open_pool
from llmnode.client.session import InferenceSession, open_session
from llmnode.core.ids import NO_SESSION, SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, LinkPolicy, ServePolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import (
    ConfigError,
    PeerRefused,
    PeerUnreachable,
    RemoteProtocolError,
    SessionClosed,
    SessionLost,
)
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import ACCEPT_QUEUE, LINK_PROTOCOL, Libp2pNetwork, open_network
from llmnode.net.link import Libp2pLink
from llmnode.node.serve.server import Server
from llmnode.testing import exact_output
from llmnode.testing.world import raise_bug
from llmnode.wire.frame import HEADER_BYTES, Frame, FrameDecoder, FrameType, encode
from llmnode.wire.messages import Fork, Open, Refusal, RefusalCode, Replay, Replayed, pack, unpack
from llmnode.wire.payload import Codec
from unit.in_trio import DEADLINE_S, in_trio

MODEL = ModelInfo("exact", b"d" * 32, blocks=4, hidden_size=2, context_tokens=100, dtype="float32")
ALL_BLOCKS = Span(0, MODEL.blocks)
ROW = MODEL.row_bytes
POLICY = LinkPolicy()
IMPATIENT = LinkPolicy(heartbeat_s=0.05, silence_s=0.3)
DESCRIBE = Frame(FrameType.DESCRIBE)


@dataclass(frozen=True)
class Served:
    """A server that runs; a crash of it fails the test."""

    server: Server
    network: Libp2pNetwork
    worker: Any  # ExactWorker, of conftest.py

    @property
    def address(self) -> str:
        return self.network.addresses[0]

    async def check_serves_and_is_empty(self) -> None:
        """A newcomer gets right answers, and nobody else holds a session or KV."""
        await self.worker.until_empty()
        assert not self.server.sessions
        async with (
            open_network([], POLICY) as network,
            connected(network, self.address) as connection,
            opened(connection) as session,
        ):
            assert bytes(await session.step(bytes([1] * ROW))) == answer_to_ones(1)


@asynccontextmanager
async def served(worker: Any, *, link: LinkPolicy = POLICY, serve: ServePolicy | None = None) -> AsyncIterator[Served]:
    server = Server(worker, MODEL, serve or ServePolicy(), on_bug=raise_bug)
    async with open_network([LISTEN_ANY_LOOPBACK], link) as network, trio.open_nursery() as nursery:
        nursery.start_soon(server.run, network)
        yield Served(server, network, worker)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(network: Libp2pNetwork, address: str) -> AsyncIterator[Connection]:
    async with open_connection(await network.dial(address)) as connection:
        yield connection


@asynccontextmanager
async def opened(connection: Connection, max_length: int = 16) -> AsyncIterator[InferenceSession]:
    route = (Hop(connection.peer, Span(0, MODEL.blocks)),)
    async with open_session(
        route, {connection.peer: connection}, MODEL, max_length, Codec.RAW, ClientPolicy()
    ) as session:
        yield session


@asynccontextmanager
async def raw_streams(address: str) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """A peer that speaks libp2p but obeys nothing above it: opens bare streams of our protocol."""
    info = info_from_p2p_addr(Multiaddr(address))
    host = new_host()
    async with host.run(listen_addrs=[]):
        await host.connect(info)
        yield lambda: host.new_stream(info.peer_id, [LINK_PROTOCOL])


def answer_to_ones(positions: int) -> bytes:
    return exact_output(bytes([1] * ROW * positions), ALL_BLOCKS)


def session_id() -> SessionId:
    return SessionId(secrets.token_bytes(SESSION_ID_BYTES))


def open_frame(session: SessionId, **changes: Any) -> Frame:
    request = Open(
        MODEL.digest,
        0,
        MODEL.blocks,
        max_length=16,
        dtype=MODEL.dtype,
        codec="raw",
        priority="interactive",
        keep_outputs=False,
    )
    return Frame(FrameType.OPEN, session, meta=pack(replace(request, **changes)))


def step_frame(session: SessionId, step: int, start: int, length: int = 1) -> Frame:
    return Frame(FrameType.STEP, session, Epoch(0), Step(step), start, length, b"", bytes(length * ROW))


async def answer_to(link: Libp2pLink, frame: Frame) -> Frame:
    await link.send(frame)
    return await link.receive()


async def refusal_to(link: Libp2pLink, frame: Frame) -> Refusal:
    answer = await answer_to(link, frame)
    assert answer.type is FrameType.REFUSAL
    assert (answer.session, answer.epoch, answer.step) == (frame.session, frame.epoch, frame.step)
    return unpack(Refusal, answer.meta)


async def read_to_end(stream: Any) -> None:
    try:
        while await stream.read(1 << 16):
            pass
    except StreamError:
        pass


async def frames_until(stream: Any, wanted: FrameType) -> Frame:
    decoder = FrameDecoder(POLICY)
    while True:
        for frame in decoder.feed(await stream.read(1 << 16)):
            if frame.type is wanted:
                return frame


# What works


@in_trio
async def test_a_session_answers_exactly_and_frees_its_kv(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection:
            assert connection.peer == swarm.network.peer
            description = await connection.describe(5.0)
            assert (description.span_start, description.span_end, description.kv_tokens_free) == (0, 4, 64)
            async with opened(connection) as session:
                first = await session.step(bytes([1] * 2 * ROW))
                second = await session.step(bytes([1] * ROW))
                await session.truncate(1)
                again = await session.step(bytes([2] * ROW))
        assert bytes(first) + bytes(second) == answer_to_ones(3)
        assert bytes(again) == exact_output(bytes([1] * ROW + [2] * ROW), ALL_BLOCKS)[ROW:]
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_sessions_share_a_connection_without_mixing_answers(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection, trio.open_nursery() as nursery:

            async def use(byte: int) -> None:
                async with opened(connection, max_length=8) as session:
                    outputs = [bytes(await session.step(bytes([byte] * ROW))) for _ in range(8)]
                    assert b"".join(outputs) == exact_output(bytes([byte] * ROW * 8), ALL_BLOCKS)

            for byte in range(1, 9):
                nursery.start_soon(use, byte)
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_peer_can_be_dialled_again_the_moment_its_link_ended(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        for _ in range(5):
            link = await network.dial(swarm.address)
            assert (await answer_to(link, DESCRIBE)).type is FrameType.DESCRIPTION
            await link.end("dialled again")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_links_over_one_connection_end_one_by_one(exact_worker: Any) -> None:
    async with (
        served(exact_worker) as swarm,
        open_network([], POLICY) as network,
        connected(network, swarm.address) as first,
        opened(first) as session,
    ):
        for _ in range(3):
            async with connected(network, swarm.address) as second:
                await second.describe(DEADLINE_S)
        assert bytes(await session.step(bytes([1] * ROW))) == answer_to_ones(1)
        assert len(network.host.get_live_peers()) == 1


# Cancellation


@in_trio
async def test_a_peer_that_was_away_can_be_dialled_as_soon_as_it_is_back(tmp_path: Path) -> None:
    identity = tmp_path / "node.key"
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY, identity) as server:
        address = server.addresses[0]
    async with open_network([], POLICY) as client:
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                await client.dial(address)
        async with open_network([address.partition("/p2p/")[0]], POLICY, identity):
            link = await client.dial(address)
            await link.end("done")


@in_trio
async def test_cancelled_questions_never_harm_the_link(exact_worker: Any) -> None:
    chance = random.Random(0)  # seeded: the same moments in every run, as far as the machine allows
    async with (
        served(exact_worker) as swarm,
        open_network([], POLICY) as network,
        connected(network, swarm.address) as connection,
        opened(connection) as session,
    ):
        for _ in range(300):
            with trio.move_on_after(chance.uniform(0.0, 0.003)):
                await connection.describe(5.0)
        assert bytes(await session.step(bytes([1] * ROW))) == answer_to_ones(1)


@in_trio
async def test_cancelled_receives_lose_no_frame(exact_worker: Any) -> None:
    chance = random.Random(1)
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        for _ in range(200):
            await link.send(DESCRIBE)
            answer = None
            while answer is None:
                with trio.move_on_after(chance.uniform(0.0, 0.002)):
                    answer = await link.receive()
            assert answer.type is FrameType.DESCRIPTION


@in_trio
async def test_a_cancelled_step_ends_its_session_instead_of_answering_the_next_one(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection, opened(connection) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.step, bytes([1] * ROW))
                await exact_worker.executor.forward_began.wait()
                nursery.cancel_scope.cancel()
            exact_worker.gate.set()
            with pytest.raises(SessionClosed, match="cancelled"):
                await session.step(bytes([7] * ROW))
            with pytest.raises(SessionClosed, match="cancelled"):
                await session.truncate(0)
            async with opened(connection) as other:  # the connection is as good as before
                assert bytes(await other.step(bytes([1] * ROW))) == answer_to_ones(1)
        await swarm.check_serves_and_is_empty()


# The end of a link


@in_trio
async def test_the_end_of_a_link_fails_every_waiter_with_a_typed_error(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    errors: list[Exception] = []

    async def use(connection: Connection) -> None:
        with pytest.raises(SessionLost) as caught:
            async with opened(connection, max_length=8) as session:
                await session.step(bytes(ROW))
        errors.append(caught.value)

    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(use, connection)
                await exact_worker.executor.forward_began.wait()
                for link in list(swarm.network._links):
                    await link.end("the test says so")
            assert len(errors) == 3
            with pytest.raises(PeerUnreachable):
                await connection.describe(5.0)
        exact_worker.gate.set()
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_questions_to_a_closed_connection_fail_at_once(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as connection:
            pass
        with pytest.raises(PeerUnreachable):
            await connection.describe(5.0)


@pytest.mark.parametrize("computing", [False, True])
@in_trio
async def test_a_vanished_client_leaves_no_session_and_no_kv(exact_worker: Any, computing: bool) -> None:
    async with served(exact_worker) as swarm:
        async with open_network([], POLICY) as network:
            link = await network.dial(swarm.address)
            for _ in range(3):
                session = session_id()
                assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
            assert exact_worker.kv_tokens_free == 64 - 3 * 16
            if computing:
                exact_worker.gate = trio.Event()
                await link.send(step_frame(session, 0, 0))
                await exact_worker.executor.forward_began.wait()
        if computing:
            exact_worker.gate.set()
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_silent_peer_is_noticed_and_its_sessions_freed(exact_worker: Any) -> None:
    async with served(exact_worker, link=IMPATIENT) as swarm, raw_streams(swarm.address) as new_stream:
        stream = await new_stream()
        await stream.write(encode(open_frame(session_id()), POLICY))
        await frames_until(stream, FrameType.OPENED)
        began = trio.current_time()
        await read_to_end(stream)  # from here on we say nothing, though we read its heartbeats
        assert trio.current_time() - began < 20 * IMPATIENT.silence_s
        await exact_worker.until_empty()


@in_trio
async def test_an_idle_link_lives_by_its_heartbeats(exact_worker: Any) -> None:
    async with served(exact_worker, link=IMPATIENT) as swarm, open_network([], IMPATIENT) as network:
        link = await network.dial(swarm.address)
        with trio.move_on_after(4 * IMPATIENT.silence_s) as patience:
            await link.receive()  # nothing comes, and the link does not end either
        assert patience.cancelled_caught
        assert (await answer_to(link, DESCRIBE)).type is FrameType.DESCRIPTION


@in_trio
async def test_who_stood_still_blames_no_peer_for_silence(exact_worker: Any) -> None:
    async with served(exact_worker, link=IMPATIENT) as swarm, open_network([], IMPATIENT) as network:
        link = await network.dial(swarm.address)
        time.sleep(2 * IMPATIENT.silence_s)  # noqa: ASYNC251  (the whole loop, as on a machine that was suspended)
        assert (await answer_to(link, DESCRIBE)).type is FrameType.DESCRIPTION


@in_trio
async def test_a_forgotten_session_frees_its_kv_and_its_link_lives(exact_worker: Any) -> None:
    impatient = ServePolicy(session_idle_s=0.1)
    async with served(exact_worker, serve=impatient) as swarm, open_network([], POLICY) as network:
        link, session = await network.dial(swarm.address), session_id()
        assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
        await exact_worker.until_empty()
        assert (await refusal_to(link, step_frame(session, 0, 0))).code == RefusalCode.UNKNOWN_SESSION


@in_trio
async def test_a_silent_server_is_noticed() -> None:
    async def ignore(stream: Any) -> None:
        await read_to_end(stream)

    mute = new_host()
    async with mute.run(listen_addrs=[Multiaddr(LISTEN_ANY_LOOPBACK)]), open_network([], IMPATIENT) as network:
        mute.set_stream_handler(LINK_PROTOCOL, ignore)
        link = await network.dial(str(mute.get_addrs()[0]))
        with pytest.raises(PeerUnreachable, match="silent"):
            await link.receive()


# Hostile bytes


def _flipped(frame: bytes, position: int) -> bytes:
    return frame[:position] + bytes([frame[position] ^ 0xFF]) + frame[position + 1 :]


def _announcing(payload_bytes: int) -> bytes:
    header = bytearray(encode(Frame(FrameType.STEP, session_id()), POLICY))
    struct.pack_into("<I", header, HEADER_BYTES - 8, payload_bytes)
    return bytes(header)


GARBAGE = {
    "noise": bytes(random.Random(2).randbytes(5000)),
    "wrong magic": b"XX" + encode(DESCRIBE, POLICY)[2:],
    "wrong version": _flipped(encode(DESCRIBE, POLICY), 2),
    "unknown type": _flipped(encode(DESCRIBE, POLICY), 3),
    "wrong checksum": _flipped(encode(open_frame(session_id()), POLICY), HEADER_BYTES + 3),
    "oversized frame": _announcing(POLICY.max_payload_bytes + 1),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
@in_trio
async def test_garbage_ends_its_own_link_alone(exact_worker: Any, garbage: bytes) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        async with connected(network, swarm.address) as bystander:
            async with raw_streams(swarm.address) as new_stream:
                stream = await new_stream()
                await stream.write(garbage)
                await read_to_end(stream)
            assert (await bystander.describe(5.0)).blocks == MODEL.blocks
        await swarm.check_serves_and_is_empty()


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
@in_trio
async def test_garbage_is_reported_as_the_peer_s_fault(garbage: bytes) -> None:
    async def answer_garbage(stream: Any) -> None:
        await stream.write(garbage)
        await read_to_end(stream)

    liar = new_host()
    async with liar.run(listen_addrs=[Multiaddr(LISTEN_ANY_LOOPBACK)]), open_network([], POLICY) as network:
        liar.set_stream_handler(LINK_PROTOCOL, answer_garbage)
        link = await network.dial(str(liar.get_addrs()[0]))
        with pytest.raises(RemoteProtocolError) as caught:
            await link.receive()
        assert caught.value.peer == link.peer
        with pytest.raises(RemoteProtocolError):
            await link.send(DESCRIBE)


@in_trio
async def test_what_waits_to_be_received_is_bounded_in_bytes(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], replace(POLICY, queue_bytes=1000)) as network:
        link = await network.dial(swarm.address)
        with suppress(RemoteProtocolError):  # it may end before we have asked as often
            for _ in range(20):
                await link.send(DESCRIBE)
        await link.wait_closed()
        received_bytes = 0

        async def drain() -> None:
            nonlocal received_bytes
            while True:
                received_bytes += (await link.receive()).size_bytes

        with pytest.raises(RemoteProtocolError, match="ahead of our reading"):
            await drain()
        assert 0 < received_bytes <= 1000
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_what_waits_to_be_written_is_bounded_in_bytes() -> None:
    policy = replace(POLICY, queue_bytes=3 * ROW)
    async with open_network([LISTEN_ANY_LOOPBACK], policy) as far, open_network([], policy) as near:
        link = await near.dial(far.addresses[0])
        sent = 0

        async def flood() -> None:
            nonlocal sent
            with suppress(PeerUnreachable):
                while True:
                    await link.send(step_frame(session_id(), 0, 0, length=1000))
                    sent += 1

        async def stall(_data: bytes) -> None:
            await trio.sleep_forever()

        link._stream.write = stall  # type: ignore[method-assign]
        link._stream.write_at_once = lambda _data: 0  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await trio.testing.wait_all_tasks_blocked()
            assert sent <= 2, "one is being written, the next is beyond the limit"
            await link.end("enough")


@in_trio
async def test_a_header_alone_costs_no_payload(exact_worker: Any) -> None:
    """What a frame announces is not allocated before it arrives."""
    async with served(exact_worker) as swarm, raw_streams(swarm.address) as new_stream:
        stream = await new_stream()
        decoder = FrameDecoder(POLICY)
        assert list(decoder.feed(_announcing(POLICY.max_payload_bytes) + bytes(100))) == []
        assert len(decoder._body) == 100
        await stream.write(_announcing(POLICY.max_payload_bytes) + bytes(100))
        await stream.reset()
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_metadata_nested_beyond_the_stack_is_refused(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        good = open_frame(session_id()).meta
        field = b"\xaaspan_start"
        at = bytes(good).index(field) + len(field)
        for depth in (100, 1000, 1020, 5000):
            nested = bytes(good[:at]) + b"\x91" * depth + bytes(good[at:])
            refusal = await refusal_to(link, Frame(FrameType.OPEN, session_id(), meta=nested))
            assert refusal.code == RefusalCode.BAD_MESSAGE
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_one_peer_cannot_take_every_link(exact_worker: Any) -> None:
    serve = ServePolicy(links=2 * POLICY.links_per_peer)
    async with served(exact_worker, serve=serve) as swarm, raw_streams(swarm.address) as new_stream:
        for _ in range(POLICY.links_per_peer):
            stream = await new_stream()
            await stream.write(encode(DESCRIBE, POLICY))
            await frames_until(stream, FrameType.DESCRIPTION)
        with pytest.raises((BaseLibp2pError, StreamError)):  # depending on how far the reset lets it come
            await frames_until(await new_stream(), FrameType.HEARTBEAT)
        async with open_network([], POLICY) as network, connected(network, swarm.address) as connection:
            assert (await connection.describe(5.0)).blocks == MODEL.blocks


@in_trio
async def test_a_link_beyond_the_server_s_limit_is_refused_not_left_hanging(exact_worker: Any) -> None:
    async with served(exact_worker, serve=ServePolicy(links=1)) as swarm, AsyncExitStack() as stack:

        async def link_of_a_newcomer() -> Libp2pLink:
            network = await stack.enter_async_context(open_network([], POLICY))
            return await network.dial(swarm.address)

        first = await link_of_a_newcomer()
        assert (await answer_to(first, DESCRIBE)).type is FrameType.DESCRIPTION
        waiting = [await link_of_a_newcomer() for _ in range(ACCEPT_QUEUE)]
        with pytest.raises(PeerUnreachable):
            await (await link_of_a_newcomer()).receive()
        await first.end("makes room")
        assert (await answer_to(waiting[0], DESCRIBE)).type is FrameType.DESCRIPTION


# Refusals: the link lives on after each


REFUSED_OPENS = {
    "wrong model": ({"model_digest": b"x" * 32}, RefusalCode.WRONG_MODEL),
    "wrong dtype": ({"dtype": "float16"}, RefusalCode.WRONG_MODEL),
    "unknown codec": ({"codec": "zip"}, RefusalCode.UNKNOWN_CODEC),
    "span not held": ({"span_end": 5}, RefusalCode.SPAN_NOT_HELD),
    "empty span": ({"span_start": 4}, RefusalCode.BAD_MESSAGE),
    "longer than the context": ({"max_length": 101}, RefusalCode.NO_ROOM),
    "a priority of its own": ({"priority": "urgent"}, RefusalCode.BAD_MESSAGE),
    "more KV than there is": ({"max_length": 65}, RefusalCode.NO_ROOM),
}


@pytest.mark.parametrize(("changes", "code"), REFUSED_OPENS.values(), ids=REFUSED_OPENS.keys())
@in_trio
async def test_an_open_is_refused(exact_worker: Any, changes: dict[str, Any], code: RefusalCode) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        assert (await refusal_to(link, open_frame(session_id(), **changes))).code == code
        assert (await answer_to(link, open_frame(session_id()))).type is FrameType.OPENED
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_name_is_open_once_whoever_opens_it(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as ours, open_network([], POLICY) as others:
        link, other = await ours.dial(swarm.address), await others.dial(swarm.address)
        session = session_id()
        assert (await answer_to(link, open_frame(session))).type is FrameType.OPENED
        for second in (link, other):
            assert (await refusal_to(second, open_frame(session))).code == RefusalCode.CONFLICT
        assert (await refusal_to(other, step_frame(session, 0, 0))).code == RefusalCode.UNKNOWN_SESSION
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT


@in_trio
async def test_sessions_over_one_link_are_limited(exact_worker: Any) -> None:
    async with served(exact_worker, serve=ServePolicy(sessions_per_link=2)) as swarm:
        async with open_network([], POLICY) as network:
            link = await network.dial(swarm.address)
            for _ in range(2):
                assert (await answer_to(link, open_frame(session_id()))).type is FrameType.OPENED
            assert (await refusal_to(link, open_frame(session_id()))).code == RefusalCode.BUSY
        await swarm.check_serves_and_is_empty()


UNASKED = [
    FrameType.DESCRIPTION,
    FrameType.OPENED,
    FrameType.RESULT,
    FrameType.TRUNCATED,
    FrameType.FORKED,
    FrameType.REFUSAL,
]


@in_trio
async def test_frames_that_make_no_sense_are_refused(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session))
        step = step_frame(session, 0, 0)
        for frame, code in [
            *((Frame(kind, session), RefusalCode.BAD_MESSAGE) for kind in UNASKED),
            (replace(DESCRIBE, meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (open_frame(NO_SESSION), RefusalCode.BAD_MESSAGE),
            (replace(open_frame(session_id()), meta=b"\xc1"), RefusalCode.BAD_MESSAGE),
            (step_frame(session_id(), 0, 0), RefusalCode.UNKNOWN_SESSION),
            (Frame(FrameType.CLOSE, session_id()), RefusalCode.UNKNOWN_SESSION),
            (replace(step, meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (replace(step, length=0, payload=b""), RefusalCode.BAD_MESSAGE),
            (replace(step, length=2**32 - 1), RefusalCode.BAD_MESSAGE),
            (replace(step, start=2**32 - 1), RefusalCode.NO_ROOM),
            (step_frame(session, 0, 0, length=17), RefusalCode.NO_ROOM),
            (step_frame(session, 0, start=1), RefusalCode.WRONG_POSITION),
            (Frame(FrameType.REPLAY, session, length=1, meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (Frame(FrameType.REPLAY, session, length=1, meta=pack(Replay(push=False))), RefusalCode.BAD_MESSAGE),
            (Frame(FrameType.TRUNCATE, session, Epoch(0)), RefusalCode.STALE_EPOCH),
            (Frame(FrameType.TRUNCATE, session, Epoch(1), start=1), RefusalCode.WRONG_POSITION),
        ]:
            assert (await refusal_to(link, frame)).code == code, frame
        assert (await answer_to(link, step)).type is FrameType.RESULT
        await link.end("done")
        await swarm.check_serves_and_is_empty()


def fork_frame(session: SessionId, source: SessionId, keep: int, shared: int = 0) -> Frame:
    return Frame(FrameType.FORK, session, Epoch(1), Step(1), start=keep, meta=pack(Fork(source, shared)))


@in_trio
async def test_a_session_that_waits_for_room_is_no_source_and_ends_when_it_is_closed(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, waiting = session_id(), session_id()
        await answer_to(link, open_frame(session, max_length=40))
        await link.send(open_frame(waiting, max_length=40))
        refusal = await refusal_to(link, fork_frame(session, waiting, 0))
        assert refusal.code == RefusalCode.UNKNOWN_SESSION
        assert set(swarm.server.sessions) == {session, waiting}
        ended = swarm.server.session_ended
        await link.send(Frame(FrameType.CLOSE, waiting))
        await ended.wait()
        assert set(swarm.server.sessions) == {session}
        assert (await answer_to(link, step_frame(session, 0, 0))).type is FrameType.RESULT
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_session_is_a_copy_of_another_one_of_its_client_alone(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network, open_network([], POLICY) as others:
        link, other_link = await network.dial(swarm.address), await others.dial(swarm.address)
        session, source, fresh, part, coded, foreign = (session_id() for _ in range(6))
        for name in (session, source):
            await answer_to(link, open_frame(name))
            assert (await answer_to(link, step_frame(name, 0, 0, length=2))).type is FrameType.RESULT
        await answer_to(link, open_frame(fresh, max_length=1))
        await answer_to(link, open_frame(part, span_end=2, max_length=1))
        await answer_to(link, open_frame(coded, codec="fp16", max_length=1))
        await answer_to(other_link, open_frame(foreign))
        assert len(swarm.server.sessions) == 6
        await answer_to(other_link, step_frame(foreign, 0, 0, length=2))
        for frame, code in [
            (replace(fork_frame(session, source, 2), meta=b"\x80"), RefusalCode.BAD_MESSAGE),
            (fork_frame(session_id(), source, 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(foreign, source, 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, session_id(), 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, NO_SESSION, 0), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, foreign, 2), RefusalCode.UNKNOWN_SESSION),
            (fork_frame(session, session, 2), RefusalCode.CONFLICT),
            (fork_frame(session, part, 0), RefusalCode.CONFLICT),
            (fork_frame(session, coded, 0), RefusalCode.CONFLICT),
            (fork_frame(session, source, 3), RefusalCode.WRONG_POSITION),
            (fork_frame(session, source, 2**32 - 1), RefusalCode.NO_ROOM),
            (fork_frame(session, source, 2, shared=3), RefusalCode.WRONG_POSITION),
            (fork_frame(fresh, source, 2, shared=1), RefusalCode.NO_ROOM),
            (fork_frame(fresh, source, 1, shared=1), RefusalCode.WRONG_POSITION),
            (replace(fork_frame(session, source, 2), epoch=Epoch(0)), RefusalCode.STALE_EPOCH),
        ]:
            assert (await refusal_to(link, frame)).code == code, frame
        again = await answer_to(link, step_frame(session, 0, 0, length=2))
        assert again.type is FrameType.RESULT, "it stands where it stood"
        copied = await answer_to(link, fork_frame(fresh, source, 1))
        assert (copied.type, copied.session, copied.epoch, copied.start) == (FrameType.FORKED, fresh, 1, 1)
        await link.end("done")
        await other_link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_copy_has_the_logged_results_of_its_positions_and_no_others(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, source, other = session_id(), session_id(), session_id()
        for name in (session, source):
            await answer_to(link, open_frame(name, keep_outputs=True))
        await answer_to(link, open_frame(other))
        results = bytes((await answer_to(link, step_frame(source, 0, 0, length=3))).payload)
        assert (await refusal_to(link, fork_frame(other, source, 0))).code == RefusalCode.CONFLICT
        await answer_to(link, fork_frame(session, source, 2))
        next_step = replace(step_frame(session, 1, 2), epoch=Epoch(1), payload=bytes([7] * ROW))
        result = bytes((await answer_to(link, next_step)).payload)
        replay = Frame(FrameType.REPLAY, session, Epoch(9), Step(0), 0, 3, pack(Replay(push=False)))
        assert bytes((await answer_to(link, replay)).payload) == results[: 2 * ROW] + result
        again = await answer_to(link, replace(replay, session=source))
        assert bytes(again.payload) == results, "the source has its own"


@in_trio
async def test_a_session_that_computes_is_no_source_yet(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, source = session_id(), session_id()
        for name in (session, source):
            await answer_to(link, open_frame(name))
        await link.send(step_frame(source, 0, 0))
        await exact_worker.executor.forward_began.wait()
        assert (await refusal_to(link, fork_frame(session, source, 0))).code == RefusalCode.BUSY
        exact_worker.gate.set()
        assert (await link.receive()).type is FrameType.RESULT
        assert (await answer_to(link, fork_frame(session, source, 1))).type is FrameType.FORKED


@in_trio
async def test_a_source_without_room_that_is_about_to_be_closed_can_be_named(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session, source = session_id(), session_id()
        await answer_to(link, open_frame(session))
        for frame in (open_frame(source, max_length=100), fork_frame(session, source, 0)):
            await link.send(frame)
        answers = [await link.receive() for _ in range(2)]
        assert RefusalCode.NO_ROOM in {
            unpack(Refusal, each.meta).code for each in answers if each.type is FrameType.REFUSAL
        }
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_logged_results_are_given_again_as_far_as_they_go(exact_worker: Any) -> None:
    async with served(exact_worker, serve=ServePolicy(replay_bytes=3 * ROW)) as swarm, open_network([], POLICY) as near:
        link = await near.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session, keep_outputs=True))
        result = await answer_to(link, step_frame(session, 0, 0, length=5))

        def replay(start: int, length: int) -> Frame:
            return Frame(FrameType.REPLAY, session, Epoch(9), Step(7), start, length, pack(Replay(push=True)))

        again = await answer_to(link, replay(1, 3))
        assert (again.type, again.epoch, again.step) == (FrameType.REPLAYED, 9, 7)
        assert bytes(again.payload) == bytes(result.payload)[ROW : 4 * ROW]
        assert not unpack(Replayed, again.meta).pushed, "there is nobody to push it to"
        for start, length in [(0, 0), (0, 4), (3, 3), (5, 1), (2**32 - 1, 2**32 - 1)]:
            assert (await refusal_to(link, replay(start, length))).code == RefusalCode.BAD_MESSAGE
        await answer_to(link, Frame(FrameType.TRUNCATE, session, Epoch(1), Step(1), start=2))
        assert (await refusal_to(link, replay(2, 1))).code == RefusalCode.BAD_MESSAGE
        assert bytes((await answer_to(link, replay(1, 1))).payload) == bytes(result.payload)[ROW : 2 * ROW]
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_step_after_close_is_refused(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session))
        await link.send(step_frame(session, 0, 0))
        await link.send(Frame(FrameType.CLOSE, session))
        late = step_frame(session, 1, 1)
        assert (await refusal_to(link, late)).code == RefusalCode.UNKNOWN_SESSION
        exact_worker.gate.set()
        assert (await link.receive()).type is FrameType.RESULT  # what came before CLOSE is still answered
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_steps_that_wait_are_limited(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session))
        for step in range(16):
            await link.send(step_frame(session, step, step))
        for _ in range(16):
            await link.send(step_frame(session, 0, 0))
        assert unpack(Refusal, (await link.receive()).meta).code == RefusalCode.TOO_FAR_AHEAD
        exact_worker.gate.set()
        while (await link.receive()).type is FrameType.REFUSAL:
            pass


@in_trio
async def test_a_refusal_names_its_code_once(exact_worker: Any) -> None:
    async with (
        served(exact_worker) as swarm,
        open_network([], POLICY) as network,
        connected(network, swarm.address) as connection,
    ):
        with pytest.raises(PeerRefused) as caught:
            async with opened(connection, max_length=1000):
                raise AssertionError("opened")
    assert caught.value.code == RefusalCode.NO_ROOM
    assert str(caught.value).count("refused") == 1
    assert swarm.network.peer in str(caught.value)


# Dialling and listening


class _Liar:
    """A private key that claims another's public key. Plaintext asks for no proof."""

    def __init__(self, own: Any, claimed: Any) -> None:
        self._own, self._claimed = own, claimed

    def get_public_key(self) -> Any:
        return self._claimed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.mark.parametrize("lies", [True, False])
@in_trio
async def test_plaintext_is_refused(exact_worker: Any, lies: bool) -> None:
    own, victim = create_new_key_pair(), create_new_key_pair()
    claimed = KeyPair(_Liar(own.private_key, victim.public_key), victim.public_key) if lies else own
    attacker = new_host(key_pair=own, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(claimed)})
    async with served(exact_worker) as swarm, attacker.run(listen_addrs=[]):
        with pytest.raises((BaseLibp2pError, StreamError)):
            await attacker.connect(info_from_p2p_addr(Multiaddr(swarm.address)))
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_dialling_in_vain_says_why(exact_worker: Any) -> None:
    someone = ID.from_pubkey(create_new_key_pair().public_key).to_base58()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        place, _, peer = swarm.address.partition("/p2p/")
        for address in (
            "",
            "/",
            "nonsense",
            place,
            f"{place}/p2p/",
            f"{place}/p2p/Qm",
            f"/ip4/1.2.3.4/tcp/-1/p2p/{peer}",
        ):
            with pytest.raises(ConfigError, match="is not the address of a peer"):
                await network.dial(address)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))  # and does not listen
            nobody = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"
            for address in (f"{place}/p2p/{someone}", f"{nobody}/p2p/{someone}", f"/p2p/{someone}"):
                with pytest.raises(PeerUnreachable) as caught:
                    await network.dial(address)
                assert caught.value.peer == someone
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_dial_that_nobody_answers_ends_at_its_deadline() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        someone = ID.from_pubkey(create_new_key_pair().public_key).to_base58()
        async with open_network([], replace(POLICY, dial_timeout_s=0.3)) as network:
            with pytest.raises(PeerUnreachable, match="no answer"):
                await network.dial(f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{someone}")
            accepted, _ = mute.accept()
            with accepted:
                accepted.settimeout(DEADLINE_S)
                while accepted.recv(1 << 16):
                    pass  # until we have closed our end


@in_trio
async def test_connections_that_ended_hold_no_task() -> None:
    """libp2p would keep one of each, and take no more connections after some hundreds."""
    few = replace(POLICY, connections=4)
    async with open_network([LISTEN_ANY_LOOPBACK], few) as server, trio.open_nursery() as nursery:

        async def serve() -> None:
            while True:
                async with server.accept() as link:
                    with suppress(PeerUnreachable):
                        await link.receive()

        nursery.start_soon(serve)
        for _ in range(4 * few.connections):
            async with open_network([], POLICY) as visitor:
                with trio.fail_after(DEADLINE_S):
                    await (await visitor.dial(server.addresses[0])).end("done")
        nursery.cancel_scope.cancel()


@in_trio
async def test_listening_in_vain_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address in ("", "nonsense", "/ip4/127.0.0.1/udp/1", f"/ip4/127.0.0.1/tcp/{port}", "/ip4/203.0.113.7/tcp/0"):
            with pytest.raises(ConfigError, match="listen"):
                async with open_network([address], POLICY):
                    pass


@in_trio
async def test_a_port_of_another_server_is_not_shared() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as first:
        place = first.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ConfigError, match="in use"):
            async with open_network([place], POLICY):
                pass


@in_trio
async def test_an_address_that_accepts_and_says_nothing_does_not_keep_a_peer_from_being_reached(
    exact_worker: Any,
) -> None:
    (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with silent, served(exact_worker) as server, open_network([], POLICY) as network, open_pool(network) as pool:
        port = silent.socket.getsockname()[1]
        dead = f"/ip4/127.0.0.1/tcp/{port}/p2p/{server.network.peer}"
        with trio.fail_after(POLICY.dial_timeout_s / 2):
            connection = await pool.connect([dead, server.address])
            await connection.describe(POLICY.dial_timeout_s)
            async with await silent.accept() as left:
                while await left.receive_some():
                    pass  # until it is closed
        assert network.count_open().connections == 1


@in_trio
async def test_many_that_dial_a_peer_at_once_share_a_connection(exact_worker: Any) -> None:
    async with served(exact_worker) as server, open_network([], POLICY) as network, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(network.dial, server.address)
        with trio.fail_after(POLICY.dial_timeout_s):
            while network.count_open().links < 5:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert network.count_open().connections == 1
