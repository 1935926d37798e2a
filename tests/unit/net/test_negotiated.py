"""The version of the protocol that two peers agree on, and the frames that were sent before they had."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest
import trio

from llmnode.core.ids import SESSION_ID_BYTES, SessionId, Step
from llmnode.core.policy import LinkPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.net.negotiated import KEPT_BYTES, link_protocol
from llmnode.wire.frame import LINK_VERSIONS, Frame, FrameType
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from libp2p.host.basic_host import BasicHost

    from llmnode.net.host import Libp2pNetwork
    from llmnode.net.link import Libp2pLink

POLICY = LinkPolicy()
SESSION = SessionId(b"s" * SESSION_ID_BYTES)
NEWEST, OLDEST = LINK_VERSIONS[0], LINK_VERSIONS[-1]


@asynccontextmanager
async def listener(
    versions: Collection[int] = LINK_VERSIONS, policy: LinkPolicy = POLICY
) -> AsyncIterator[Libp2pNetwork]:
    """A peer that speaks these versions alone."""
    async with open_network([LISTEN_ANY_LOOPBACK], policy) as network:
        for version in LINK_VERSIONS:
            if version not in versions:
                del cast("BasicHost", network.host).multiselect.handlers[link_protocol(version)]
        yield network


async def exchanged(ours: Libp2pLink, theirs: Libp2pLink, frames: list[Frame]) -> None:
    """Each frame arrives once and in its order, and the link works in both directions."""
    for frame in frames:
        assert await theirs.receive() == frame
    await theirs.send(Frame(FrameType.DESCRIPTION, step=Step(9)))
    assert (await ours.receive()).step == 9


def some_frames(sizes: Collection[int]) -> list[Frame]:
    return [
        Frame(FrameType.STEP, SESSION, step=Step(number), payload=bytes([number % 256]) * size)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("versions", [(NEWEST, OLDEST), (NEWEST,), (OLDEST,)], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [[], [0], [10] * 200, [KEPT_BYTES - 1000, 5000, 10], [KEPT_BYTES, 1], [2 * KEPT_BYTES] * 2],
    ids=["none", "one", "many", "more than is kept", "one that is not kept", "large"],
)
@in_trio
async def test_frames_that_were_sent_before_the_answer_arrive_once_in_any_version(
    versions: tuple[int, ...], sizes: list[int]
) -> None:
    async with listener(versions) as other, open_network([], POLICY) as network:
        ours = await network.dial(other.addresses[0])
        assert ours.version is None, "nobody has answered yet"
        frames = some_frames(sizes)
        async with trio.open_nursery() as nursery, other.accept() as theirs:

            async def send() -> None:
                for frame in frames:
                    await ours.send(frame)

            nursery.start_soon(send)
            await exchanged(ours, theirs, frames)
            assert (await ours.wait_version(), ours.version, theirs.version) == (max(versions),) * 3


@in_trio
async def test_a_link_to_an_older_peer_leaves_no_stream_behind() -> None:
    async with listener([OLDEST]) as other, open_network([], POLICY) as network:
        ours = await network.dial(other.addresses[0])
        async with other.accept() as theirs:
            await ours.send(Frame(FrameType.DESCRIBE))
            await exchanged(ours, theirs, [Frame(FrameType.DESCRIBE)])
            (connection,) = cast("BasicHost", network.host).get_network().get_connections()
            protocols = [str(each.get_protocol()) for each in connection.get_streams()]
            assert [each for each in protocols if "/llmnode/" in each] == [link_protocol(OLDEST)]
            await ours.end("done")
            with pytest.raises(PeerUnreachable, match=r"closed the stream|connection lost"):
                await theirs.receive()


@in_trio
async def test_a_peer_that_speaks_no_version_of_ours_refuses_the_link_and_nobody_waits_for_ever() -> None:
    async with listener([]) as other, open_network([], POLICY) as network:
        ours = await network.dial(other.addresses[0])
        with pytest.raises(PeerUnreachable, match="another version") as caught:
            await ours.receive()
        assert caught.value.peer == other.peer
        with pytest.raises(PeerUnreachable, match="another version"):
            await ours.wait_version()


@in_trio
async def test_a_link_that_ends_before_the_answer_has_no_version() -> None:
    async with listener() as other, open_network([], POLICY) as network:
        ours = await network.dial(other.addresses[0])
        await ours.end("no longer wanted")
        with pytest.raises(PeerUnreachable, match="no longer wanted"):
            await ours.wait_version()


@pytest.mark.parametrize("version", [NEWEST, OLDEST])
@in_trio
async def test_the_version_is_known_before_anything_is_asked(version: int) -> None:
    silent = LinkPolicy(heartbeat_s=1000, silence_s=3000)
    async with listener([version], silent) as other, open_network([], silent) as network:
        ours = await network.dial(other.addresses[0])
        with trio.fail_after(10):
            assert await ours.wait_version() == version
