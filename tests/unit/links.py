"""A server and links over real libp2p hosts in one process, with a worker that needs no torch."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import trio
import trio.testing
from libp2p import new_host
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from llmnode.core.ids import SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, LinkPolicy, ServePolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import LINK_PROTOCOL, Libp2pNetwork, open_network
from llmnode.net.link import Libp2pLink
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import serve_links
from llmnode.session.session import InferenceSession, open_session
from llmnode.swarm.peer_connection import PeerConnection, open_connection
from llmnode.testing import exact_output
from llmnode.testing.world import raise_bug
from llmnode.wire.frame import Frame, FrameDecoder, FrameType
from llmnode.wire.messages import OpenRequest, Refusal, pack, unpack
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms

MODEL = ModelInfo("exact", b"d" * 32, blocks=4, hidden_size=2, context_tokens=100)
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
    async with open_network([LISTEN_ANY_LOOPBACK], link) as network, trio.open_nursery() as nursery:
        server = Server(network, MODEL, serve or ServePolicy(), on_bug=raise_bug)
        server.serve(worker)
        nursery.start_soon(serve_links, server)
        try:
            yield Served(server, network, worker)
        finally:  # what is computed is not cut short, so nothing may hold it back for ever
            if worker.gate is not None:
                worker.gate.set()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(network: Libp2pNetwork, address: str) -> AsyncIterator[PeerConnection]:
    async with open_connection(await network.dial(address)) as connection:
        yield connection


@asynccontextmanager
async def opened(connection: PeerConnection, max_length: int = 16) -> AsyncIterator[InferenceSession]:
    route = (Hop(connection.peer, Span(0, MODEL.blocks)),)
    terms = SessionTerms(MODEL, max_length, Codec.RAW, ClientPolicy())
    async with open_session(route, {connection.peer: connection}, terms) as session:
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
    request = OpenRequest(
        MODEL.digest,
        0,
        MODEL.blocks,
        max_length=16,
        dtype=MODEL.precision.name,
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
