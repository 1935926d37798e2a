"""The right to push to one session of another server, as far as that has granted it.

A next hop that is older than grants refuses the question. Then pushes are made as before: unasked, until it refuses
one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import Epoch, Step
from llmnode.core.links.push_grants import PushCredit
from llmnode.errors import PeerRefused
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, RefusalCode, pack, unpack
from llmnode.wire.push_messages import PushLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.core.ids import SessionId
    from llmnode.swarm.peer_connection import PeerConnection


class PushRight:
    """Its methods raise PeerError if the connection has ended."""

    def __init__(
        self,
        connection: PeerConnection,
        session: SessionId,
        numbers: Iterator[int],
        patience_s: float,
        pause_s: float,
        may_ask: Callable[[int], bool],
    ) -> None:
        """`numbers` are those of all rights of this server. A right is waited for `patience_s` at most.

        A next hop that is too busy for the question is asked again after `pause_s`. So is one that the client may not
        have asked now: `may_ask` says so, and counts the question. It counts two if the right may have to be withdrawn
        later, since the next hop looks at a withdrawal like at a question.
        """
        self.connection = connection
        self.session = session
        self.is_wanted = False
        """Whether the next hop was asked, and no withdrawal was sent since. That one is counted already."""
        self._numbers = numbers
        self._number = Step(next(numbers))
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._may_ask = may_ask
        self._credit = PushCredit()
        self._asked = Epoch(-1), 0
        self._is_needed = True
        self._is_refused = False
        self._is_slow = False  # the link of the next hop has not taken the last question
        self._asks_again_s = -math.inf  # the next hop was too busy for the last question, or it was one too many
        self._way: PeerConnection | None = None
        self._news = trio.Event()

    async def prepare(self, epoch: Epoch, size_bytes: int) -> None:
        """Ask to be allowed a push of this size in this epoch, for `get` to have it at once.

        If the link of the next hop has not taken the last question in time, `get` alone tries again.
        """
        if not self._is_slow and not self._is_asked(epoch, size_bytes):
            with trio.move_on_after(self._patience_s):
                await self._ask(epoch, size_bytes)

    async def get(self, epoch: Epoch, size_bytes: int) -> bool:
        """Whether a push of this size may be made now. Then it counts."""
        allowed = self._allows(epoch, size_bytes) if self._way is self.connection.best else None
        if allowed is None:
            with trio.move_on_after(self._patience_s):
                await self._ask(epoch, size_bytes)
                while self._allows(epoch, size_bytes) is None:
                    await self._news.wait()
            allowed = self._allows(epoch, size_bytes)
        if not allowed:
            if allowed is None and self.is_wanted and not self._is_slow:
                self.is_wanted = False
                with trio.move_on_after(self._patience_s):
                    await self._say_wanted(epoch, 0)
            return False
        self._credit.spend(size_bytes)
        return True

    def close(self) -> None:
        """It is not used any more."""
        if self._way is not None:
            self._way.mute(self.session, self._hear)

    async def _ask(self, epoch: Epoch, size_bytes: int) -> None:
        """Ask for the right, unless it is there or asked for already."""
        if self._way is not None and self._way is not self.connection.best:
            self._leave()
        if self._is_asked(epoch, size_bytes):
            return
        if self._way is None:
            self._way = self.connection.best
            self._way.listen(self.session, self._hear, self._wake)
        if self._may_ask(1 if self.is_wanted else 2):
            self.is_wanted = True
            await self._say_wanted(epoch, self._limit_bytes(epoch, size_bytes))
        else:
            self._asks_again_s = trio.current_time() + self._pause_s

    def _is_asked(self, epoch: Epoch, size_bytes: int) -> bool:
        """Whether the right is there, or asked for, over the best connection."""
        if self._way is None or self._way is not self.connection.best:
            return False
        if not self._is_needed or self._is_refused or self._credit.allows(epoch, size_bytes) is not None:
            return True
        if trio.current_time() < self._asks_again_s:  # that is enough
            return True
        return (epoch, self._limit_bytes(epoch, size_bytes)) <= self._asked

    def _limit_bytes(self, epoch: Epoch, size_bytes: int) -> int:
        """The limit that a further push of this size needs."""
        return size_bytes + (self._credit.sent_bytes if epoch == self._credit.epoch else 0)

    async def _say_wanted(self, epoch: Epoch, limit_bytes: int) -> None:
        """Tell the next hop. If that is cancelled, since its link takes nothing, it is told again at the next step."""
        assert self._way is not None
        self._asked, self._is_slow = (Epoch(-1), 0), True
        want = Frame(FrameType.WANT, self.session, epoch, self._number, meta=pack(PushLimit(limit_bytes)))
        try:
            await self._way.tell(want)
        except PeerRefused:  # the next hop speaks protocol 1
            self._is_needed = False
        self._asked, self._is_slow = (epoch, limit_bytes), False

    def _allows(self, epoch: Epoch, size_bytes: int) -> bool | None:
        if self._is_refused or self._way is None or self._way.has_ended:
            return False
        if not self._is_needed:
            return True
        allowed = self._credit.allows(epoch, size_bytes)
        return False if allowed is None and trio.current_time() < self._asks_again_s else allowed

    def _leave(self) -> None:
        """There is a better connection, or it has ended: then the next hop has forgotten what it has granted."""
        assert self._way is not None
        self._way.mute(self.session, self._hear)
        if self._way.has_ended:
            self._number, self._credit = Step(next(self._numbers)), PushCredit()
        self._way, self._asked, self._is_slow, self._asks_again_s = None, (Epoch(-1), 0), False, -math.inf

    def _hear(self, frame: Frame) -> None:
        """The next hop says something about the session. Raises RemoteProtocolError."""
        if frame.type is FrameType.GRANT and frame.step == self._number:
            self._credit.hear(frame.epoch, unpack(PushLimit, frame.meta).limit_bytes)
        elif frame.type is FrameType.REFUSAL:
            code = unpack(Refusal, frame.meta).code
            if code == RefusalCode.UNKNOWN_FRAME:
                self._is_needed = False
            elif code == RefusalCode.BUSY and self._is_needed and frame.step == self._number:  # not a push
                self._asked, self._asks_again_s = (Epoch(-1), 0), trio.current_time() + self._pause_s
            else:
                self._is_refused = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()
