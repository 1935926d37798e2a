"""Requests of one link that a server answers in tasks of their own. A limited number of them are under way at once."""

from __future__ import annotations

import logging
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.errors import PeerError, PeerRefused, RemoteProtocolError
from llmnode.node.serve.request_memory import RETRY_S
from llmnode.wire.messages import RefusalCode
from llmnode.wire.refusal import refusal_for, refusal_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.core.ids import PeerId, Step
    from llmnode.node.serve.conduct import Conduct
    from llmnode.node.serve.request_memory import HeldRequest, RequestMemory
    from llmnode.ports import Link
    from llmnode.wire.frame import Frame

log = logging.getLogger(__name__)


class LinkRequests:
    """Each is a task in `nursery`, and holds `memory` in the scope of the link."""

    def __init__(
        self,
        link: Link,
        nursery: trio.Nursery,
        memory: RequestMemory,
        conduct: Conduct,
        on_bug: Callable[[PeerId, Exception], None],
        most: int,
        what: str,
    ) -> None:
        """`most` may be under way, and each is a `what`, for the client to read. The others are the server's."""
        self._link = link
        self._nursery = nursery
        self._memory = memory
        self._conduct = conduct
        self._on_bug = on_bug
        self._most = most
        self._what = what
        self._under_way: dict[trio.CancelScope, Step] = {}

    def begin(
        self,
        frame: Frame,
        answer: Callable[[], Awaitable[Frame]],
        work_bytes: int = 0,
        end: Callable[[], None] = lambda: None,
        patience_s: float = inf,
    ) -> None:
        """Send what `answer` gives for a request. It is called when there are `work_bytes`, and `end` after it.

        `answer` may raise PeerRefused, or RemoteProtocolError for what is malformed: the link pays for that. Both
        are told in the turn of the client's address group: they cost no worker anything. If this raises PeerRefused,
        the request has not begun, and `end` is not called.
        """
        if len(self._under_way) >= self._most:
            why = f"{self._most} are under way over this link: no further {self._what} is taken now"
            raise PeerRefused(RefusalCode.BUSY, why, retry_after_s=RETRY_S)
        held = self._memory.hold(self._link.scope, frame.size_bytes, work_bytes, self._what)
        scope = trio.CancelScope()
        self._under_way[scope] = frame.step
        self._nursery.start_soon(self._run, frame, answer, end, held, scope, patience_s)

    def cancel(self, step: Step) -> None:
        """Nobody waits any more for the answer to the request of this step."""
        for scope, each in self._under_way.items():
            if each == step:
                scope.cancel()

    def close(self) -> None:
        """The link has ended: nobody waits for what is under way."""
        for scope in self._under_way:
            scope.cancel()

    async def _run(
        self,
        frame: Frame,
        answer: Callable[[], Awaitable[Frame]],
        end: Callable[[], None],
        held: HeldRequest,
        scope: trio.CancelScope,
        patience_s: float,
    ) -> None:
        refused: PeerRefused | RemoteProtocolError | None = None
        try:
            with scope:
                try:
                    with trio.move_on_after(patience_s) as patience:
                        refused = await self._answer(frame, answer, held)
                finally:
                    held.end()
                    end()
                if patience.cancelled_caught:
                    refused = PeerRefused(RefusalCode.BUSY, f"the time for this {self._what} is over")
                if refused is not None:
                    await self._refuse(frame, refused)
        except PeerError as error:
            log.debug("not answered: %s", error)
        except Exception as error:  # noqa: BLE001  one request that nobody foresaw is not to end the server
            reason = f"this server failed in a way that nobody foresaw: {type(error).__name__}"
            with suppress(PeerError):
                await self._link.send(refusal_of(frame, RefusalCode.COMPUTE_FAILED, reason))
            self._on_bug(self._link.peer, error)
        finally:
            del self._under_way[scope]

    async def _answer(
        self, frame: Frame, answer: Callable[[], Awaitable[Frame]], held: HeldRequest
    ) -> PeerRefused | RemoteProtocolError | None:
        """The error, if there is no answer."""
        try:
            await held.begin_work()
            answered = await answer()
        except (PeerRefused, RemoteProtocolError) as error:
            return error
        await self._link.send(answered)
        return None

    async def _refuse(self, frame: Frame, error: PeerRefused | RemoteProtocolError) -> None:
        refusal = refusal_for(frame, error)
        await self.wait_turn(refusal)
        await self._link.send(refusal)
        if isinstance(error, RemoteProtocolError):
            await self._conduct.note_malformed(self._link)

    async def wait_turn(self, answer: Frame) -> None:
        """Until the turn of the client's address group, for an answer that cost no worker anything."""
        with suppress(PeerRefused):
            await self._conduct.wait_turn(self._link, answer)
