"""The frames that wait for a session: those of its client, within its budget, and what the hop before pushes."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.node.serve.push_inlet import PushInlet
from llmnode.node.serve.session_memory import SessionMemory
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.budget import Scope
    from llmnode.node.serve.push_inlet import LinkGrants
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.wire.payload import HiddenForm
    from llmnode.wire.stage import Stage


class SessionInbox:
    """Links put frames in, and the session's task takes them out one by one, and says when it is done with each."""

    def __init__(self, stage: Stage, form: HiddenForm, around: Scope, served: ServedSpan) -> None:
        """`around` is the scope of the client's link."""
        self._stage = stage
        self._form = form
        policy = served.policy
        rows_bytes = form.bytes_of(stage.max_length)
        self.memory = SessionMemory(around, rows_bytes, policy, served.work_turns)
        self.pushes = PushInlet(stage.session, stage.epoch, stage.max_length, form.bytes_of(1), served.desk)
        most_frames = 4 * policy.steps_ahead + policy.pushed_ahead
        self._put, self._frames = trio.open_memory_channel[Frame](most_frames)
        self.waits_since_s = math.inf
        """Since when the session waits for a frame; infinite while it does not."""

    async def put(self, frame: Frame) -> None:
        """A frame of the client, after a wait if there is no memory for it.

        Raises RemoteProtocolError or PeerRefused for what cannot be.
        """
        if frame.type is FrameType.STEP:
            self._check(frame)
        await self.memory.queue(frame.size_bytes)
        try:
            self._put.send_nowait(frame)
        except trio.WouldBlock:
            self.memory.drop(frame.size_bytes)
            raise PeerRefused(RefusalCode.TOO_FAR_AHEAD, "too many steps are waiting") from None
        except trio.ClosedResourceError:
            self.memory.drop(frame.size_bytes)
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "this session is being closed") from None

    def put_pushed(self, frame: Frame, grants: LinkGrants) -> bool:
        """A step that the hop before has sent. It waits for nothing. False if it was not granted. Raises as `put`."""
        if not self.pushes.take(frame, self._stage.epoch, grants):
            return False
        try:
            self._check(frame)
            if self.pushes.is_full:
                raise PeerRefused(RefusalCode.TOO_FAR_AHEAD, "too many pushed steps are waiting")
            self._put.send_nowait(frame)
        except (PeerRefused, RemoteProtocolError):
            self.pushes.drop()
            raise
        except (trio.WouldBlock, trio.ClosedResourceError) as error:
            self.pushes.drop()
            raise PeerRefused(RefusalCode.BUSY, "the session takes no more frames now") from error
        return True

    async def take(self) -> Frame:
        """The next frame. Raises trio.EndOfChannel after the last one."""
        self.waits_since_s = trio.current_time()
        frame = await self._frames.receive()
        self.waits_since_s = math.inf
        return frame

    def rest(self) -> list[Frame]:
        """All frames that nobody has taken."""
        frames: list[Frame] = []
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                frames.append(self._frames.receive_nowait())
        return frames

    def done(self, frame: Frame, logged_bytes: int) -> None:
        """A frame that was taken is dealt with: it waits in the stage for its turn, or is no more."""
        self.pushes.follow(self._stage.epoch)
        was_pushed = self.pushes.settle(frame, self._stage.held)
        self.settle(0 if was_pushed else frame.size_bytes, logged_bytes)

    def settle(self, size_bytes: int, logged_bytes: int) -> None:
        """That much of what was queued is done with. The session keeps `logged_bytes` of results."""
        self.memory.settle(size_bytes, self._stage.held_bytes - self.pushes.held_bytes, logged_bytes)

    def close(self) -> None:
        """Nothing more is put in."""
        self._put.close()

    def end(self) -> None:
        """Nothing more is taken out."""
        self.close()
        self.waits_since_s = math.inf
        self.pushes.close()
        self.memory.close()

    def _check(self, frame: Frame) -> None:
        self._form.check(frame)
        self._stage.check(frame)
