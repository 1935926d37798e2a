"""Anything that a peer sends, or fails to send, ends as one typed error at its own link; memory stays bounded."""

from __future__ import annotations

import random
import struct
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamError
from multiaddr import Multiaddr

from llmnode.core.policy import BudgetPolicy, LinkPolicy, ServePolicy
from llmnode.errors import PeerUnreachable, RemoteProtocolError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import ACCEPT_QUEUE, LINK_PROTOCOL, open_network
from llmnode.net.link import Libp2pLink
from llmnode.wire.frame import HEADER_BYTES, Frame, FrameDecoder, FrameType, encode
from llmnode.wire.messages import RefusalCode
from unit.in_trio import in_trio
from unit.links import (
    DESCRIBE,
    MODEL,
    POLICY,
    ROW,
    answer_to,
    connected,
    frames_until,
    open_frame,
    raw_streams,
    read_to_end,
    refusal_to,
    served,
    session_id,
    step_frame,
)


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
    policy = replace(POLICY, queue_bytes=1000, write_timeout_s=0.2)
    async with served(exact_worker) as swarm, open_network([], policy) as network:
        link = await network.dial(swarm.address)
        with suppress(PeerUnreachable):  # it may end before the last question
            for _ in range(20):
                await link.send(DESCRIBE)
        await link.wait_closed()
        received_bytes = 0

        async def drain() -> None:
            nonlocal received_bytes
            while True:
                received_bytes += (await link.receive()).size_bytes

        with pytest.raises(PeerUnreachable, match="was not taken in time"):
            await drain()
        assert 1000 < received_bytes <= 1400, "the next answer has to wait, and then the link ends"
        await swarm.check_serves_and_is_empty()


@pytest.mark.parametrize("changes", [{"queue_bytes": 1000}, {"queue_frames": 4}], ids=["bytes", "frames"])
@in_trio
async def test_more_than_may_wait_arrives_all_the_same_if_it_is_read_in_time(
    exact_worker: Any, changes: dict[str, int]
) -> None:
    async with served(exact_worker) as swarm, open_network([], replace(POLICY, **changes)) as network:
        link = await network.dial(swarm.address)
        for _ in range(20):
            await link.send(DESCRIBE)
        while not link._arriving_bytes:  # noqa: ASYNC110  a link has no event for it
            await trio.sleep(0.01)  # it holds back the next one, which counts meanwhile
        for _ in range(20):
            assert (await link.receive()).type is FrameType.DESCRIPTION


@pytest.mark.parametrize("memory_mib", [1, 64, 512, 4096])
def test_what_waits_and_one_more_of_the_largest_stay_within_the_share_of_a_peer(memory_mib: int) -> None:
    budget = BudgetPolicy(memory_bytes=memory_mib << 20)
    policy, share = LinkPolicy(budget=budget), budget.peer_share * budget.memory_bytes
    assert 0 < policy.most_queued_bytes <= share / 4
    assert policy.most_queued_bytes + policy.max_payload_bytes + policy.max_meta_bytes <= share or memory_mib < 512


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
    """The payload that a frame announces is not allocated before it arrives."""
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
        await first.end("is evicted")
        assert (await answer_to(waiting[0], DESCRIBE)).type is FrameType.DESCRIPTION
