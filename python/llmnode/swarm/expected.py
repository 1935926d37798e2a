"""An answer that a task waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.texts.visible import printable
from llmnode.errors import PeerError, PeerRefused, PeerTimeout, RemoteProtocolError
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.ids import PeerId


class Expected:
    """An answer that is awaited, as a context: after it the answer is dropped. Made by `PeerConnection.expect`."""

    def __init__(self, peer: PeerId, forget: Callable[[], object]) -> None:
        self._peer = peer
        self._forget = forget
        self._answer: Frame | None = None
        self._ended: PeerError | None = None
        self._arrived = trio.Event()
        self._has_result = False

    def __enter__(self) -> Expected:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def arrive(self, answer: Frame) -> bool:
        """Take an answer. Whether it counts: the first one does, until it is received.

        A hop that gets a step twice, pushed and from us, sends its RESULT twice. The second one answers nothing.
        """
        if self._answer is not None or (self._has_result and answer.type is FrameType.RESULT):
            return False
        self._answer = answer
        self._arrived.set()
        return True

    def end(self, error: PeerError) -> None:
        """The connection has ended. An answer that came before counts."""
        self._ended = error
        self._arrived.set()

    async def receive(self, answer_type: FrameType, timeout_s: float) -> Frame:
        """Wait for the answer. Raises PeerTimeout if it does not come in time; then it may be awaited again.

        Each PeerError says how long that was.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # an answer to what was given up since then blames nobody
        since_s = trio.current_time()
        if not self._arrived.is_set():
            with trio.CancelScope(deadline=since_s + timeout_s) as patience:
                await self._arrived.wait()
            if patience.cancelled_caught:
                late = PeerTimeout(f"no {answer_type.name} in {timeout_s:g} s", peer=self._peer)
                raise late.after(timeout_s)
        if (answer := self._answer) is None:
            assert self._ended is not None
            raise self._ended.again().after(trio.current_time() - since_s)
        self._answer = None
        self._has_result = self._has_result or answer.type is FrameType.RESULT
        if self._ended is None:
            self._arrived = trio.Event()
        try:
            return read_answer(answer, answer_type, self._peer)
        except PeerError as error:
            error.after(trio.current_time() - since_s)
            raise


def read_answer(answer: Frame, expected: FrameType, peer: PeerId) -> Frame:
    """The answer of `peer`, which is to be of this type. Raises PeerRefused and RemoteProtocolError."""
    if answer.type is FrameType.REFUSAL:
        try:
            refusal = unpack(Refusal, answer.meta)
        except RemoteProtocolError as error:
            raise error.blame(peer) from None
        retry_after_s = refusal.retry_after_ms / 1000 or None
        # The words are the peer's, and a program may print the error.
        code, message = printable(refusal.code), printable(refusal.message)
        raise PeerRefused(code, message, retry_after_s=retry_after_s, peer=peer)
    if answer.type is not expected:
        raise RemoteProtocolError(f"answered {answer.type.name} where {expected.name} is due", peer=peer)
    return answer
