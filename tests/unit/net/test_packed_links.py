"""Links whose frames are packed, over real libp2p hosts with a proxy between them that makes the line slow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import trio
import trio.testing

from bench.kit.proxy import ShapingProxy
from llmnode import _native
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, LinkPolicy, ServePolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerUnreachable, RemoteProtocolError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.link import Libp2pLink
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import serve_links
from llmnode.session.session import open_session
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import ExactWorker, exact_output
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms
from unit.in_trio import DEADLINE_S, in_trio

MOST_FRAMES = 30
SLOW_BYTES_PER_S = 3e6
"""On which packing saves three times what it has to, where it packs 300 MB/s."""
POLICY = LinkPolicy()
SESSION = SessionId(b"s" * SESSION_ID_BYTES)
MODEL = ModelInfo("exact", b"d" * 32, blocks=4, hidden_size=1024, context_tokens=4096)
ROWS = 128


@dataclass(frozen=True)
class Line:
    """Two hosts, and the address at which the first reaches the second."""

    one: Libp2pNetwork
    other: Libp2pNetwork
    address: str


@asynccontextmanager
async def line(bytes_per_s: float | None, policy: LinkPolicy = POLICY) -> AsyncIterator[Line]:
    """`policy` is the second host's."""
    async with (
        open_network([], POLICY) as one,
        open_network([LISTEN_ANY_LOOPBACK], policy) as other,
        trio.open_nursery() as nursery,
    ):
        (address,) = other.addresses
        if bytes_per_s is not None:
            _, _, host, _, port, *_ = address.split("/")
            proxy = ShapingProxy()
            proxy.shape.bytes_per_s = bytes_per_s
            proxy.aim((host, int(port)))
            address = address.replace(f"/tcp/{port}/", f"/tcp/{await nursery.start(proxy.run)}/")
        yield Line(one, other, address)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def linked(over: Line) -> AsyncIterator[tuple[Libp2pLink, Libp2pLink]]:
    async with trio.open_nursery() as nursery:
        accepted: list[Libp2pLink] = []
        ready, done = trio.Event(), trio.Event()

        async def accept() -> None:
            async with over.other.accept() as link:
                accepted.append(link)
                ready.set()
                await done.wait()

        nursery.start_soon(accept)
        link = await over.one.dial(over.address)
        await ready.wait()
        yield link, accepted[0]
        await link.end("done")
        done.set()


def floats(seed: int, size_bytes: int) -> bytes:
    """Hidden states, as to their exponents; and what is not a number."""
    values = np.random.default_rng(seed).standard_normal(size_bytes // 4, dtype=np.float32)
    values[:4] = np.nan, np.inf, -0.0, 1e-45
    return values.tobytes()


async def carry(sender: Libp2pLink, receiver: Libp2pLink, seed: int, size_bytes: int) -> None:
    """One frame, that must arrive as it was sent."""
    payload = floats(seed, size_bytes)
    await sender.send(Frame(FrameType.STEP, SESSION, payload=payload, value_bytes=4))
    arrived = await receiver.receive()
    assert arrived.payload == payload and not arrived.packed


@pytest.mark.parametrize("size_bytes", [400_000, 1_500_000], ids=["at once", "in a thread"])
@in_trio
async def test_on_a_slow_line_packing_goes_on_by_itself_and_what_arrives_is_right_to_the_bit(size_bytes: int) -> None:
    async with line(SLOW_BYTES_PER_S) as over, linked(over) as (near, far):
        for seed in range(MOST_FRAMES):
            await carry(near, far, seed, size_bytes)
            if over.one.traffic.sent_bytes < over.one.traffic.sent_plain_bytes:
                break
        before = over.one.traffic
        for seed in range(8):
            await carry(near, far, seed, size_bytes)
    last = over.one.traffic.since(before)
    assert 0.8 < last.sent_bytes / last.sent_plain_bytes < 0.95, "it stays on"
    received, sent = over.other.traffic, over.one.traffic
    assert received.received_bytes == sent.sent_bytes < received.received_plain_bytes == sent.sent_plain_bytes


@in_trio
async def test_a_sender_knows_how_fast_its_frames_are_taken_once_it_has_sent_large_ones() -> None:
    async with line(SLOW_BYTES_PER_S) as over, linked(over) as (near, far):
        await carry(near, far, 0, 1_500_000)
        while not (told := over.one.send_rates.by_group(trio.current_time())):
            await trio.testing.wait_all_tasks_blocked(0.01)
        ((rate,),) = told.values()
        assert rate == pytest.approx(SLOW_BYTES_PER_S, rel=0.5)
        assert not over.other.send_rates.by_group(trio.current_time()), "it has sent nothing large"
        now_s = trio.current_time()
        for kilobytes_per_s in (2, 1):
            near._hear_beat(Frame(FrameType.HEARTBEAT, start=kilobytes_per_s), now_s)
        ((rate,),) = over.one.send_rates.by_group(now_s).values()
        assert rate == 2000.0, "a rate counts for what was sent since the one before"


@in_trio
async def test_on_loopback_hardly_anything_is_packed_however_busy_the_machine() -> None:
    async with line(None) as over, linked(over) as (near, far):
        for seed in range(30):
            await carry(near, far, seed, 1_500_000)
        assert near._packer._choice.bytes_per_s is not None, "it knows how fast the link is"
    assert over.one.traffic.sent_plain_bytes == 30 * 1_500_000
    assert over.one.traffic.sent_bytes > 0.97 * over.one.traffic.sent_plain_bytes, "a fifth of the frames, at most"


@in_trio
async def test_each_direction_is_judged_by_itself() -> None:
    async with line(SLOW_BYTES_PER_S) as over, linked(over) as (near, far):
        for seed in range(MOST_FRAMES):
            await carry(near, far, seed, 400_000)
            await carry(far, near, seed, 2304)  # small frames tell nothing about the other way
    assert over.one.traffic.sent_bytes < over.one.traffic.sent_plain_bytes
    assert over.other.traffic.sent_bytes == over.other.traffic.sent_plain_bytes


@in_trio
async def test_what_is_no_numbers_is_not_packed_on_any_line() -> None:
    async with line(SLOW_BYTES_PER_S) as over, linked(over) as (near, far):
        for _ in range(6):
            await near.send(Frame(FrameType.STEP, SESSION, payload=bytes(400_000)))
            assert (await far.receive()).payload == bytes(400_000)
    assert over.one.traffic.sent_bytes == over.one.traffic.sent_plain_bytes


@in_trio
async def test_a_session_over_packed_links_is_right_to_the_bit() -> None:
    worker = ExactWorker(Span(0, MODEL.blocks), row_bytes=MODEL.row_bytes, kv_tokens=MODEL.context_tokens)
    async with line(SLOW_BYTES_PER_S) as over, trio.open_nursery() as nursery:
        server = Server(over.other, MODEL, ServePolicy())
        server.serve(worker)
        nursery.start_soon(serve_links, server)
        async with open_connection(await over.one.dial(over.address)) as connection:
            route, links = (Hop(connection.peer, worker.span),), {connection.peer: connection}
            policy = ClientPolicy(chunk_tokens=ROWS)
            terms = SessionTerms(MODEL, MODEL.context_tokens, Codec.RAW, policy)
            async with open_session(route, links, terms) as session:
                given, got = bytearray(), bytearray()
                for rows in (8 * ROWS, 1, 1, 4 * ROWS, 1):
                    numbers = np.random.default_rng(rows).standard_normal(rows * MODEL.row_bytes // 4, dtype=np.float32)
                    hidden = np.tanh(numbers).astype(np.float32).tobytes()
                    given += hidden
                    got += await session.step(hidden)
                position = session.position
            description = await connection.describe(DEADLINE_S)
        nursery.cancel_scope.cancel()
    assert got == exact_output(bytes(given), worker.span)
    plain_bytes = position * MODEL.row_bytes
    ours = over.one.traffic
    assert ours.sent_bytes < ours.sent_plain_bytes == plain_bytes == ours.received_plain_bytes
    assert (description.received_bytes, description.received_plain_bytes) == (ours.sent_bytes, plain_bytes)
    assert (description.positions, description.sent_bytes) == (position, ours.received_bytes)


SMALL = LinkPolicy(max_payload_bytes=1000)
SPOILED = {
    "noise": b"noise",
    "nothing": b"",
    "more than a frame may have": _native.pack(bytes(1004), 4),
    "a lane cut short": _native.pack(floats(0, 900), 4)[:-1],
}


@pytest.mark.parametrize("payload", SPOILED.values(), ids=SPOILED.keys())
@in_trio
async def test_what_does_not_unpack_ends_the_link_with_a_typed_error(payload: bytes) -> None:
    async with line(None, SMALL) as over, linked(over) as (near, far):
        await near.send(Frame(FrameType.STEP, SESSION, payload=payload, packed=True))
        with pytest.raises(RemoteProtocolError, match=r"STEP: .*packed"):
            await far.receive()
        with pytest.raises(PeerUnreachable):
            await near.receive()
