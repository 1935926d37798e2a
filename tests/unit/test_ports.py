"""Both twins of each port to the network keep the same promises: the real one, and the one in memory of simulations."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.ids import PeerId, SessionId, Step
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerError, PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.testing import MemoryDirectory, open_internet
from llmnode.wire.frame import Frame, FrameType
from unit.dht_members import DIGEST, Member, member
from unit.twins import on_twins

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.ports import Link, Network

POLICY = LinkPolicy(heartbeat_s=0.1, silence_s=0.6, queue_frames=64)
SESSIONS = [SessionId(bytes([number] * 16)) for number in range(1, 4)]


# Network and Link


@asynccontextmanager
async def networks(twin: str, policy: LinkPolicy = POLICY) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """A function that opens networks, which last as long as the context."""
    async with AsyncExitStack() as stack:
        if twin == "real":

            async def opened() -> Network:
                return await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], policy))

        else:
            internet = await stack.enter_async_context(open_internet(policy=policy))
            numbers = count()

            async def opened() -> Network:
                return internet.network(str(next(numbers)))

        yield opened


@asynccontextmanager
async def linked(twin: str, policy: LinkPolicy = POLICY) -> AsyncIterator[tuple[Link, Link]]:
    """Both ends of a link: the one that dialled, and the one that accepted."""
    async with networks(twin, policy) as opened:
        one, other = await opened(), await opened()
        one.vouch(other.addresses)
        near = await one.dial(other.addresses[0])
        await near.send(step(0))
        async with other.accept() as far:
            assert same([await far.receive()], [step(0)])
            yield near, far


def step(number: int, size: int = 0, session: SessionId = SESSIONS[0]) -> Frame:
    return Frame(FrameType.STEP, session, step=Step(number), start=3, length=4, meta=b"meta", payload=bytes(size))


def same(arrived: Sequence[Frame], sent: Sequence[Frame]) -> bool:
    def content(frame: Frame) -> tuple[object, ...]:
        header = frame.type, frame.session, frame.epoch, frame.step, frame.start, frame.length
        return *header, bytes(frame.meta), bytes(frame.payload)

    return [content(frame) for frame in arrived] == [content(frame) for frame in sent]


async def end_of(link: Link) -> tuple[list[Frame], PeerError]:
    """All frames that come, and the error at the end."""
    frames: list[Frame] = []
    while True:
        try:
            frames.append(await link.receive())
        except PeerError as error:
            return frames, error


@on_twins("real", "memory")
async def test_frames_arrive_whole_and_in_the_order_of_their_session(twin: str) -> None:
    sent = [step(number, (0, 10, 300_000)[number // 3 % 3], SESSIONS[number % 3]) for number in range(36)]
    arrived: list[list[Frame]] = [[], []]
    async with linked(twin) as ends:

        async def send(link: Link) -> None:
            for frame in sent:
                await link.send(frame)

        async def receive(link: Link, frames: list[Frame]) -> None:
            while len(frames) < len(sent):
                frames.append(await link.receive())

        async with trio.open_nursery() as nursery:
            for link, frames in zip(ends, arrived, strict=True):
                nursery.start_soon(send, link)
                nursery.start_soon(receive, link, frames)
    for frames in arrived:
        of_session = defaultdict(list)
        for frame in frames:
            of_session[frame.session].append(frame)
        for number, session in enumerate(SESSIONS):
            assert same(of_session[session], sent[number::3])


@on_twins("real", "memory")
async def test_both_ends_know_each_other_and_speak_one_version(twin: str) -> None:
    async with networks(twin) as opened:
        one, other = await opened(), await opened()
        assert one.peer != other.peer
        one.vouch(other.addresses)
        near = await one.dial(other.addresses[0])
        await near.send(step(0))
        async with other.accept() as far:
            assert (near.peer, far.peer) == (other.peer, one.peer)
            assert await near.wait_version() == await far.wait_version() == near.version == far.version
            for link in (near, far):
                assert link.group
                assert not link.relayed
                assert link.relay_limit_bytes is None
                await link.wait_direct()


@on_twins("real", "memory")
async def test_a_link_that_ends_gives_what_was_sent_before_and_fails_at_both_ends(twin: str) -> None:
    async with linked(twin) as (near, far):
        for number in range(3):
            await near.send(step(number))
        await near.end("done")
        await near.end("done again")
        frames, far_error = await end_of(far)
        assert same(frames, [step(number) for number in range(3)])
        _, near_error = await end_of(near)
        for link, error in ((near, near_error), (far, far_error)):
            assert isinstance(error, PeerUnreachable)
            assert error.peer == link.peer
            with pytest.raises(PeerUnreachable):
                await link.send(step(9))


@on_twins("real", "memory")
async def test_an_accepted_link_ends_with_its_context(twin: str) -> None:
    async with networks(twin) as opened:
        one, other = await opened(), await opened()
        one.vouch(other.addresses)
        near = await one.dial(other.addresses[0])
        await near.send(step(0))
        async with other.accept():
            pass
        _, error = await end_of(near)
        assert isinstance(error, PeerUnreachable)


@on_twins("real", "memory")
async def test_a_link_ends_if_more_comes_than_may_wait_and_nobody_takes_it(twin: str) -> None:
    async with linked(twin, replace(POLICY, write_timeout_s=1.0)) as (near, far):
        with suppress(PeerUnreachable):
            for number in count():
                await near.send(step(number))
        frames, error = await end_of(far)
        assert same(frames, [step(number) for number in range(POLICY.queue_frames)])
        assert isinstance(error, PeerUnreachable)


@on_twins("real", "memory")
async def test_a_cancelled_call_sends_nothing_and_loses_nothing(twin: str) -> None:
    async with linked(twin) as (near, far):
        for number in range(20):
            with trio.CancelScope() as scope:
                scope.cancel()
                await near.send(step(100 + number))
            assert scope.cancelled_caught
            await near.send(step(number))
            frame = None
            while frame is None:
                with trio.move_on_after(0.0005):
                    frame = await far.receive()
            assert same([frame], [step(number)])


@on_twins("real", "memory")
async def test_what_was_sent_is_written_and_a_link_that_has_ended_says_so(twin: str) -> None:
    async with linked(twin) as (near, far):
        await near.wait_written()
        for number, size in enumerate((10, 300_000, 20)):
            await near.send(step(number, size))
        await near.wait_written()
        for _ in range(3):
            await far.receive()
        await near.wait_written()
        await near.end("test")
        with pytest.raises(PeerUnreachable):
            await near.wait_written()


@on_twins("real", "memory")
async def test_an_idle_link_lives(twin: str) -> None:
    async with linked(twin) as (near, far):
        await trio.sleep(3 * POLICY.silence_s)
        await far.send(step(1))
        assert same([await near.receive()], [step(1)])


@on_twins("real", "memory")
async def test_hidden_states_are_counted_and_news_are_not(twin: str) -> None:
    async with networks(twin) as opened:
        one, other = await opened(), await opened()
        one.vouch(other.addresses)
        near = await one.dial(other.addresses[0])
        await near.send(step(0, 500))
        await near.send(Frame(FrameType.NEWS, payload=bytes(70)))
        async with other.accept() as far:
            for _ in range(2):
                await far.receive()
            assert (one.traffic.sent_plain_bytes, one.traffic.received_plain_bytes) == (500, 0)
            assert (other.traffic.sent_plain_bytes, other.traffic.received_plain_bytes) == (0, 500)


@on_twins("real", "memory")
async def test_what_cannot_be_dialled_is_said(twin: str) -> None:
    async with networks(twin) as opened:
        one, other = await opened(), await opened()
        stranger = other.addresses[0].rpartition("/p2p/")[0] + f"/p2p/{one.peer}x"
        with pytest.raises(ConfigError):
            await one.dial("no address")
        one.vouch([other.addresses[0]])
        with pytest.raises((PeerUnreachable, ConfigError)):
            await one.dial(stranger)


@on_twins("real", "memory")
async def test_a_signature_is_of_one_peer_and_one_message(twin: str) -> None:
    async with networks(twin) as opened:
        one, other = await opened(), await opened()
        signature = one.sign(b"message")
        assert len(signature) == 64
        assert len(one.key) == len(other.key) == 32
        assert one.key != other.key
        for network in (one, other):
            assert network.verify(one.peer, b"message", signature)
            assert not network.verify(other.peer, b"message", signature)
            assert not network.verify(one.peer, b"massage", signature)
            assert not network.verify(one.peer, b"message", signature[:-1] + bytes([signature[-1] ^ 1]))
            assert not network.verify(one.peer, b"message", b"")
            assert not network.verify(PeerId("nobody"), b"message", signature)


# Directory


@asynccontextmanager
async def members(twin: str) -> AsyncIterator[Callable[[], Awaitable[Member]]]:
    async with AsyncExitStack() as stack:
        if twin == "real":
            contact = await stack.enter_async_context(member())

            async def joined() -> Member:
                return await stack.enter_async_context(member(contact.address))

        else:
            opened = await stack.enter_async_context(networks(twin))
            directory: Any = MemoryDirectory()

            async def joined() -> Member:
                return Member(await opened(), directory)

        yield joined


@on_twins("real", "memory")
async def test_a_directory_names_the_latest_of_each_peer_of_a_model(twin: str) -> None:
    async with members(twin) as joined:
        servers = [await joined() for _ in range(2)]
        asking, other = await joined(), await joined()
        assert await asking.directory.find(b"n" * 32) == []
        wanted: dict[PeerId, SignedAnnouncement] = {}
        found: dict[PeerId, SignedAnnouncement] | None = None
        await other.directory.publish(other.announcement(profile=Profile(b"o" * 32, Precision())))
        while found != wanted:
            for server in servers:
                await server.directory.publish(server.announcement(age_s=5))
                wanted[server.network.peer] = latest = server.announcement(span=Span(2, 3))
                await server.directory.publish(latest)
            answer = await asking.directory.find(DIGEST)
            found = {each.announcement.peer: each for each in answer}
            assert len(found) == len(answer), "a peer is named once"
            assert other.network.peer not in found
