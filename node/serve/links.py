"""Links that peers open to us: how many, what ends them, and what every node answers, whatever it serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.core.budget import Resource
from llmnode.errors import PeerRefused, PeerUnreachable, RemoteProtocolError
from llmnode.swarm.view_exchange import QUESTIONS
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode, check_empty, pack
from llmnode.wire.probe_messages import Probed
from llmnode.wire.refusal import refusal_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.core.ids import PeerId
    from llmnode.node.serve.conduct import Conduct
    from llmnode.ports import Link, Network
    from llmnode.swarm.membership import Swarm

log = logging.getLogger(__name__)


def log_bug(peer: PeerId, error: Exception) -> None:
    log.error("what peer=%s had here has ended by what nobody foresaw", peer, exc_info=error)


async def accept_links(
    network: Network,
    most: int,
    serve: Callable[[Link], Awaitable[None]],
    on_bug: Callable[[PeerId, Exception], None] = log_bug,
) -> None:
    """Call `serve` for every link that is opened to us, `most` at a time, until cancelled; it ends with its link.

    An unforeseen error ends that link alone, and `on_bug` is told of it.
    """
    slots = trio.CapacityLimiter(most)

    async def serve_next(slot: object, task_status: trio.TaskStatus[None]) -> None:
        try:
            async with network.accept() as link:
                task_status.started()
                log.info("link opened peer=%s", link.peer)
                try:
                    await serve(link)
                except* (PeerUnreachable, RemoteProtocolError) as group:
                    for error in group.exceptions:
                        log.info("link ended %s", error)
                except* Exception as group:  # noqa: BLE001  as of a session: it costs nobody else anything
                    on_bug(link.peer, group)
        finally:
            slots.release_on_behalf_of(slot)

    async with trio.open_nursery() as nursery:
        while True:
            await slots.acquire_on_behalf_of(slot := object())
            await nursery.start(serve_next, slot)


async def answer_as_relay(swarm: Swarm, conduct: Conduct, link: Link) -> None:
    """Answer about the swarm alone, as a relay that holds no blocks."""
    while True:
        frame = await link.receive()
        try:
            await conduct.wait_turn(link, frame)
            if frame.type in (FrameType.DESCRIBE, FrameType.OPEN):
                raise PeerRefused(RefusalCode.SPAN_NOT_HELD, "this is a relay: it holds no blocks")
            await answer_any(swarm, conduct, link, frame)
        except (PeerRefused, RemoteProtocolError) as error:
            await link.send(refusal_for(frame, error))
            if isinstance(error, RemoteProtocolError):
                await conduct.note_malformed(link)


async def _answer_with_view(swarm: Swarm, link: Link, frame: Frame) -> Frame:
    """Raises PeerRefused if there is no memory for the answer, which the link holds from when it is sent."""
    answer_bytes = swarm.most_answer_bytes
    if not link.scope.take(Resource.MEMORY, answer_bytes):
        raise PeerRefused(RefusalCode.BUSY, "no memory is left for an answer now")
    link.scope.reserve(Resource.ANSWERS, answer_bytes)  # they have no limit of their own
    try:
        return await swarm.answer(frame, link)
    finally:
        link.scope.release(Resource.ANSWERS, answer_bytes)
        link.scope.release(Resource.MEMORY, answer_bytes)


def _answer_probe(conduct: Conduct, link: Link, frame: Frame) -> Frame:
    """The digest of its bytes, which the link has reserved memory for. Raises PeerRefused for too many probes."""
    check_empty(frame)
    if len(frame.payload) > conduct.probe_bytes:
        raise RemoteProtocolError(f"a probe of {len(frame.payload)} bytes, at most {conduct.probe_bytes} allowed")
    if (wait_s := conduct.take_probe(link)) is not None:
        raise PeerRefused(RefusalCode.BUSY, "your address sends many probes", retry_after_s=wait_s)
    digest = _native.blake3_digest(frame.payload)
    return Frame(FrameType.PROBED, frame.session, frame.epoch, frame.step, meta=pack(Probed(digest)))


async def answer_any(swarm: Swarm | None, conduct: Conduct, link: Link, frame: Frame) -> None:
    """Answer what every node answers, whatever it serves.

    Raises RemoteProtocolError for malformed frames and frames of other types, PeerRefused for unknown types, without
    memory, and for too many probes.
    """
    if frame.type is FrameType.PROBE:
        await link.send(_answer_probe(conduct, link, frame))
    elif frame.type in QUESTIONS and swarm is not None:
        answer = await _answer_with_view(swarm, link, frame)
        await conduct.wait_answer(link, answer)
        await link.send(answer)
    elif frame.type is FrameType.NEWS and swarm is not None:
        await swarm.take_news(frame, link)
    elif not frame.type.is_known:
        raise PeerRefused(RefusalCode.UNKNOWN_FRAME, f"this llmnode knows no frame {frame.type.name}")
    else:
        raise RemoteProtocolError(f"a client does not send {frame.type.name} frames")
