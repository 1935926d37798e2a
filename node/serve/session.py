"""One session of a client, served: drives the `Stage` and does what it decides.

A result goes to the client, and where the client has asked for it, at the same time straight to the next hop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.core.ids import PeerId, SessionId
from llmnode.errors import ConfigError, PeerError, PeerRefused, RemoteProtocolError
from llmnode.ports import Piece
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Forward, Refusal, RefusalCode, Result, pack, unpack
from llmnode.wire.stage import Answer, Compute, Refuse, Truncate, Wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.client.connection import Connection
    from llmnode.core.policy import ServePolicy
    from llmnode.core.span import Span
    from llmnode.ports import Link, Worker
    from llmnode.wire.frame import Buffer
    from llmnode.wire.payload import HiddenForm
    from llmnode.wire.stage import Action, Stage

    FindPeer = Callable[[PeerId], Awaitable[Connection]]
    """A connection to a peer that serves the same model. Raises PeerError."""

log = logging.getLogger(__name__)


class ServedSession:
    """Its task (`run`) owns the stage; the link's loop only queues frames with `submit`."""

    def __init__(
        self,
        stage: Stage,
        span: Span,
        form: HiddenForm,
        link: Link,
        worker: Worker,
        policy: ServePolicy,
        find_peer: FindPeer,
    ) -> None:
        self.stage = stage
        self.sender: PeerId | None = None
        """Who besides the client may send its steps."""
        self._span = span
        self._link = link
        self._worker = worker
        self._form = form
        self._policy = policy
        self._find_peer = find_peer
        self._receiver: tuple[Connection, SessionId] | None = None
        self._submitted, self._frames = trio.open_memory_channel[Frame](4 * policy.steps_ahead)

    def submit(self, frame: Frame) -> None:
        """Queue a STEP, TRUNCATE or FORWARD frame. Raises RemoteProtocolError or PeerRefused for what cannot be."""
        if frame.type is FrameType.STEP:
            self._form.check(frame)
            # The stage would refuse it too, in its turn; but what waits must be bounded by the KV that was asked for.
            if frame.start + frame.length > self.stage.max_length:
                raise PeerRefused(
                    RefusalCode.NO_ROOM,
                    f"position {frame.start + frame.length} is beyond the session's maximum of {self.stage.max_length}",
                )
        try:
            self._submitted.send_nowait(frame)
        except trio.WouldBlock:
            raise PeerRefused(RefusalCode.TOO_FAR_AHEAD, "too many steps are waiting") from None
        except trio.ClosedResourceError:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "this session is being closed") from None

    def close(self) -> None:
        """End the session after the frames that are queued."""
        self._submitted.close()

    async def run(self) -> None:
        """Reserve KV and serve steps until the client closes, or falls silent for too long."""
        name = self.stage.session
        if not await self._worker.open(name, self._span, self.stage.max_length):
            reason = f"{self.stage.max_length} positions asked for, {self._worker.kv_tokens_free} free"
            await self._link.send(refusal_of(Frame(FrameType.OPEN, name), RefusalCode.NO_ROOM, reason))
            return
        await self._link.send(Frame(FrameType.OPENED, name))
        while True:
            with trio.move_on_after(self._policy.session_idle_s) as idle:
                try:
                    frame = await self._frames.receive()
                except trio.EndOfChannel:
                    return
            if idle.cancelled_caught:
                log.info("session idle, closed peer=%s", self._link.peer)
                return
            if frame.type is FrameType.FORWARD:
                await self._stand_between(frame)
                continue
            action = self.stage.receive(frame)
            while not isinstance(action, Wait):
                await self._act(action)
                action = self.stage.next_held()

    async def _act(self, action: Action) -> None:
        match action:
            case Compute(frame):
                await self._compute(frame)
            case Truncate(frame, keep):
                await self._worker.truncate(self.stage.session, keep)
                await self._link.send(Frame(FrameType.TRUNCATED, frame.session, frame.epoch, frame.step, start=keep))
            case Answer(frame):
                await self._link.send(frame)
            case Refuse(frame, code, reason):
                await self._link.send(refusal_of(frame, code, reason))

    async def _compute(self, frame: Frame) -> None:
        try:
            computed = await self._worker.forward(
                Piece(frame.session, frame.start, frame.length, self._form.decode(frame))
            )
            payload = self._form.encode(computed.hidden)
        except RemoteProtocolError as error:
            await self._refuse_step(frame, RefusalCode.BAD_MESSAGE, error.message)
        except ConfigError as error:  # the codec cannot carry what we computed
            await self._worker.truncate(frame.session, frame.start)
            await self._refuse_step(frame, RefusalCode.COMPUTE_FAILED, str(error))
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory and kernel errors
            log.exception("step failed span=%s", self._worker.span)
            await self._refuse_step(frame, RefusalCode.COMPUTE_FAILED, str(error))
        else:
            pushed = await self._push(frame, payload)
            digest = _native.blake3_digest(frame.payload)
            result = pack(Result(computed.queue_us, computed.compute_us, digest, pushed))
            answer = Frame(
                FrameType.RESULT, frame.session, frame.epoch, frame.step, frame.start, frame.length, result, payload
            )
            self.stage.computed(answer)
            await self._link.send(answer)

    async def _stand_between(self, frame: Frame) -> None:
        """Take steps from, and push results to, whom the client names."""
        try:
            request = unpack(Forward, frame.meta)
            self.sender = PeerId(request.sender) if request.sender else None
            self._receiver = None
            if request.receiver:
                connection = await self._find_peer(PeerId(request.receiver))
                self._receiver = connection, SessionId(request.receiver_session)
        except RemoteProtocolError as error:
            await self._link.send(refusal_of(frame, RefusalCode.BAD_MESSAGE, error.message))
        except PeerError as error:
            await self._link.send(refusal_of(frame, RefusalCode.CANNOT_FORWARD, str(error)))
        else:
            await self._link.send(Frame(FrameType.FORWARDED, frame.session, frame.epoch, frame.step))

    async def _push(self, frame: Frame, payload: Buffer) -> bool:
        """Give our result to the next hop, as its step of the same number."""
        if self._receiver is None:
            return False
        connection, session = self._receiver
        step = Frame(FrameType.STEP, session, frame.epoch, frame.step, frame.start, frame.length, b"", payload)
        try:
            await connection.tell(step)
        except PeerError as error:
            log.info("cannot push: %s", error)
            self._receiver = None
            return False
        return True

    async def _refuse_step(self, frame: Frame, code: RefusalCode, reason: str) -> None:
        self.stage.failed()
        await self._link.send(refusal_of(frame, code, reason))


def refusal_of(frame: Frame, code: str, message: str) -> Frame:
    """The typed no to `frame`."""
    meta = pack(Refusal(code=str(code), message=message[:2000], retry_after_ms=0))
    return Frame(FrameType.REFUSAL, frame.session, frame.epoch, frame.step, meta=meta)
