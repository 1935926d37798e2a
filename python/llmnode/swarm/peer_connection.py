"""A client's side of one link: sends questions, and hands each answer to the task that asked."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import NO_SESSION, Step
from llmnode.core.links.unasked import UnaskedFrames
from llmnode.core.links.uplink import SHARE_BYTES_PER_S
from llmnode.core.peers.company import Company
from llmnode.core.peers.whereabouts import RELAYED
from llmnode.core.view import Source
from llmnode.errors import (
    LocalProtocolError,
    PeerError,
    PeerFull,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    RemoteProtocolError,
)
from llmnode.swarm.brought_adapters import BroughtAdapters
from llmnode.swarm.expected import Expected, read_answer
from llmnode.swarm.uploads import Lane, StartSoon, Uploads
from llmnode.wire import version_1
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.load_now import load_of
from llmnode.wire.messages import Description, RefusalCode, unpack
from llmnode.wire.refusal import is_farewell_of_full

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from llmnode.core.ids import Epoch, PeerId, SessionId
    from llmnode.core.peers.asked_loads import LoadNow
    from llmnode.ports import Link
    from llmnode.wire.frame import Buffer

    Question = tuple[SessionId, Epoch, Step]


FAREWELL_S = 1.0
"""A question that is given up is taken back within this time, or not at all."""
TAKES_WITHIN_S = 60.0
"""Where too much waits for a peer already, the next frame waits for this long from the peer's latest answer on, and for
the time that it takes on a slow uplink. The peer may read as slowly as a link allows: 32 MiB then take half an hour."""


class PeerConnection:
    """One link, shared by all sessions that use its peer. Made by `open_connection`, whose nursery has `start_soon`."""

    def __init__(self, link: Link, uploads: Uploads, start_soon: StartSoon) -> None:
        self._link = link
        self.lane = Lane(uploads, link.wait_written, start_soon)
        self._waiting: dict[Question, Expected] = {}
        self._ended: PeerError | None = None
        self._has_ended = trio.Event()
        self._questions = 0  # the number of those that belong to no session: each has a step of its own
        self._told_s = trio.current_time()
        self._answered_s = -math.inf
        self._unasked = UnaskedFrames(self._told_s)
        self.sessions: dict[SessionId, float] = {}
        """The sessions whose answers come over it, and since when. It stays open for them."""
        self.company = Company()
        """The positions of these sessions that the peer has now, by their steps."""
        self.computed_s = -math.inf
        """When the peer has given the latest result of a step."""
        self.adapters = BroughtAdapters(self.ask_large, link.peer, self.lane)
        self.introduced: dict[PeerId, float] = {}
        """When the peer was told about its next hops."""
        self.knows_prompts = True
        """False once the peer has said that it knows no deep prompts."""
        self.knows_digests = True
        """False once the peer has said that it knows no digests of views."""
        self.knows_dropout = True
        """False once the peer has said that it knows no dropout."""
        self._listeners: dict[SessionId, tuple[Callable[[Frame], None], Callable[[], None]]] = {}
        self._gone: dict[SessionId, PeerRefused] = {}
        """The sessions that the peer has ended unasked, and why."""
        self._says_full = False
        """The last frame says that the link makes way for others."""
        self._better: PeerConnection | None = None
        self._has_better = trio.Event()

    @property
    def peer(self) -> PeerId:
        return self._link.peer

    @property
    def source(self) -> Source:
        """The peer, as a source of announcements."""
        return source_of(self._link)

    @property
    def relayed(self) -> bool:
        """Whether it goes through a relay."""
        return self._link.relayed

    @property
    def only_relayed(self) -> bool:
        """Whether it goes through a relay, and there is no better connection."""
        return self._link.relayed and self.best.relayed

    @property
    def version(self) -> int | None:
        """The protocol that both sides speak; None while the peer has not agreed to one."""
        return self._link.version

    @property
    def relay_limit_bytes(self) -> int | None:
        return self._link.relay_limit_bytes

    @property
    def better(self) -> PeerConnection | None:
        """A direct connection to the same peer, if this one is relayed. Sessions may move there."""
        return self._better

    @better.setter
    def better(self, better: PeerConnection | None) -> None:
        self._better = better
        if better is None:
            self._has_better = trio.Event()
        else:
            self._has_better.set()

    async def wait_better(self) -> None:
        """Wait until there is a better connection, or this one has ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_ended, nursery.cancel_scope)
            await self._has_better.wait()
            nursery.cancel_scope.cancel()

    async def _cancel_when_ended(self, scope: trio.CancelScope) -> None:
        await self._has_ended.wait()
        scope.cancel()

    @property
    def best(self) -> PeerConnection:
        """The better connection if there is one that is open, else this one."""
        better = self._better
        return self if better is None or better.has_ended else better

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def take_session(self, session: SessionId) -> None:
        """Answers of `session` come over it from now on."""
        self.sessions.setdefault(session, trio.current_time())

    async def wait_direct(self) -> None:
        """Wait until a new connection to the peer would not go through a relay."""
        await self._link.wait_direct()

    async def wait_unused(self, idle_s: float) -> None:
        """Wait until no session uses it, and nothing was sent for `idle_s`. Then everything sent has arrived."""
        while self.sessions or self._waiting or trio.current_time() < self._told_s + idle_s:  # noqa: ASYNC110
            await trio.sleep(idle_s)

    async def describe(self, timeout_s: float) -> Description:
        return self._described(await self.ask_peer(FrameType.DESCRIBE, FrameType.DESCRIPTION, timeout_s))

    async def ask_load(self, timeout_s: float, *, opens: bool) -> LoadNow | None:
        """The load of the server now. None if it is too old to say. `opens`: we are about to open a session there."""
        question = replace(self._question(FrameType.DESCRIBE, b"", b"", 0), start=1, length=int(opens))
        description = self._described(await self.ask(question, FrameType.DESCRIPTION, timeout_s))
        try:
            return load_of(description)
        except RemoteProtocolError as error:
            raise error.blame(self.peer) from None

    def _described(self, answer: Frame) -> Description:
        try:
            description = unpack(Description, answer.meta)
        except (RemoteProtocolError, PeerRefused) as error:
            raise error.blame(self.peer) from None
        if not description.span_start < description.span_end <= description.blocks:
            raise RemoteProtocolError("describes a span that its model does not have", peer=self.peer)
        return description

    async def ask_peer(
        self,
        question: FrameType,
        answer_type: FrameType,
        timeout_s: float,
        meta: bytes = b"",
        payload: Buffer = b"",
        value_bytes: int = 0,
    ) -> Frame:
        """Ask a question that belongs to no session. Raises as `ask` does."""
        return await self.ask(self._question(question, meta, payload, value_bytes), answer_type, timeout_s)

    async def ask_pass(
        self,
        question: FrameType,
        answer_type: FrameType,
        timeout_s: float,
        meta: bytes,
        payload: Buffer,
        value_bytes: int,
        begin: Callable[[], None] = lambda: None,
    ) -> Frame:
        """Ask for a pass, as `ask_large` does. The peer is told if nobody waits for the answer any more.

        `begin` is called when the question has its place in the uplink.
        """
        frame, has_begun = self._question(question, meta, payload, value_bytes), False

        def note_begun() -> None:
            nonlocal has_begun
            has_begun = True
            begin()

        try:
            return await self._ask_large(frame, answer_type, timeout_s, note_begun)
        except (PeerTimeout, trio.Cancelled):
            if not has_begun:
                raise
            with trio.move_on_after(FAREWELL_S, shield=True), contextlib.suppress(PeerError):
                await self.tell(Frame(FrameType.CLOSE, NO_SESSION, step=frame.step))
            raise

    async def ask_large(
        self, question: FrameType, answer_type: FrameType, timeout_s: float, meta: bytes = b"", payload: Buffer = b""
    ) -> Frame:
        """Like `ask_peer`, in its turn over our uplink. The time for the answer begins when the question is written."""
        return await self._ask_large(self._question(question, meta, payload, 0), answer_type, timeout_s)

    async def _ask_large(
        self, frame: Frame, answer_type: FrameType, timeout_s: float, begin: Callable[[], None] = lambda: None
    ) -> Frame:
        with self.expect(frame.session, frame.epoch, frame.step) as answer:
            async with self.lane.turn(frame.size_bytes):
                begin()
                await self.tell(frame)
                await self._link.wait_written()
            return await answer.receive(answer_type, timeout_s)

    def _question(self, kind: FrameType, meta: bytes, payload: Buffer, value_bytes: int) -> Frame:
        """With a step of its own, which names it."""
        self._questions = (self._questions + 1) % 2**32
        return Frame(kind, NO_SESSION, step=Step(self._questions), meta=meta, payload=payload, value_bytes=value_bytes)

    async def ask(self, frame: Frame, answer_type: FrameType, timeout_s: float) -> Frame:
        """Send `frame` and wait for its answer, which has the same session, epoch and step.

        Raises PeerRefused, PeerTimeout, PeerUnreachable or RemoteProtocolError, each naming the peer.
        """
        with self.expect(frame.session, frame.epoch, frame.step) as answer:
            await self.tell(frame)
            return await answer.receive(answer_type, timeout_s)

    def expect(self, session: SessionId, epoch: Epoch, step: Step) -> Expected:
        """Within the context, the answer to this question is kept, whichever task sends it. Raises as `ask` does."""
        question = session, epoch, step
        if question in self._waiting:
            raise LocalProtocolError("this step is waiting for its answer already")
        if self._ended is not None:
            raise self._ended.again()
        if (gone := self._gone.get(session)) is not None:
            raise PeerRefused(gone.code, gone.reason, retry_after_s=gone.retry_after_s, peer=self.peer)
        expected = self._waiting[question] = Expected(self.peer, partial(self._waiting.pop, question, None))
        self._unasked.allow()
        return expected

    def listen(self, session: SessionId, hear: Callable[[Frame], None], end: Callable[[], None]) -> None:
        """Have `hear` called with what the peer says about a session, other than answers. It may raise PeerError.

        `end` is called when the connection has ended.
        """
        self._listeners[session] = hear, end

    def mute(self, session: SessionId, hear: Callable[[Frame], None]) -> None:
        """`hear` is called no more."""
        if (listener := self._listeners.get(session)) is not None and listener[0] == hear:
            del self._listeners[session]

    @property
    def is_listened_to(self) -> bool:
        """Whether anybody hears what the peer says about a session, as for pushes to it."""
        return bool(self._listeners)

    async def tell(self, frame: Frame) -> None:
        """Send a frame that has no answer.

        Raises PeerRefused if the peer speaks too old a protocol for it, and PeerTimeout if it takes nothing more.
        """
        self._told_s = trio.current_time()
        self._unasked.allow()
        if version_1.has_more(frame) and await self._link.wait_version() == version_1.VERSION:
            try:
                frame = version_1.without_more(frame)
            except PeerRefused as error:
                raise error.blame(self.peer) from None
        if self._link.is_full:
            await self._send_when_taken(frame)
        else:
            await self._link.send(frame)

    async def _send_when_taken(self, frame: Frame) -> None:
        since_s, within_s = trio.current_time(), TAKES_WITHIN_S + frame.size_bytes / SHARE_BYTES_PER_S
        while (until_s := max(since_s, self._answered_s) + within_s) > trio.current_time():
            with trio.move_on_at(until_s):
                return await self._link.send(frame)
        late = PeerTimeout(f"takes nothing more, and has answered nothing in {within_s:.0f} s", peer=self.peer)
        raise late.after(trio.current_time() - since_s)

    async def run(self) -> None:
        """Hand out answers until the link ends. Then every open question fails with the link's error."""
        try:
            while True:
                frame = await self._link.receive()
                self._says_full = False
                waiter = self._waiting.get((frame.session, frame.epoch, frame.step))
                if waiter is not None and waiter.arrive(frame):
                    self._answered_s = trio.current_time()
                    continue
                if self._unasked.count(trio.current_time()):
                    raise RemoteProtocolError("sends without end what nobody has asked for")
                if waiter is not None:
                    continue  # the first answer counts
                if (listener := self._listeners.get(frame.session)) is not None:
                    listener[0](frame)
                else:
                    self._note_unasked(frame)
        except PeerError as error:
            if self._says_full and isinstance(error, PeerUnreachable):
                error = PeerFull("others need the place of this link")
            self._ended = error.blame(self.peer)
        finally:
            if self._ended is None:  # the task was cancelled
                self._ended = PeerUnreachable("connection closed", peer=self.peer)
            self._has_ended.set()
            for waiter in self._waiting.values():
                waiter.end(self._ended)
            for _, end in self._listeners.values():
                end()

    def _note_unasked(self, frame: Frame) -> None:
        """Nobody waits for the frame: it comes too late, or says that the peer has a session or our link no more."""
        self._says_full = is_farewell_of_full(frame)
        if frame.type is FrameType.REFUSAL and frame.session in self.sessions:
            try:
                read_answer(frame, FrameType.REFUSAL, self.peer)
            except PeerRefused as refusal:
                if refusal.code == RefusalCode.UNKNOWN_SESSION:
                    self._gone = {each: why for each, why in self._gone.items() if each in self.sessions}
                    self._gone[frame.session] = refusal
            except RemoteProtocolError:
                pass

    async def wait_ended(self) -> None:
        await self._has_ended.wait()

    async def end(self) -> None:
        await self._link.end("client is done")

    @property
    def error(self) -> PeerError:
        """The reason of its end: a fresh error at each call."""
        assert self._ended is not None
        return self._ended.again()


@contextlib.asynccontextmanager
async def open_connection(link: Link, uploads: Uploads | None = None) -> AsyncIterator[PeerConnection]:
    """A running connection over `link`, which shares the uplink with others. The link ends with the context."""
    async with trio.open_nursery() as nursery:
        connection = PeerConnection(link, uploads or Uploads(), nursery.start_soon)
        nursery.start_soon(connection.run)
        try:
            yield connection
        finally:
            await connection.end()
            nursery.cancel_scope.cancel()


def source_of(link: Link) -> Source:
    """The peer on the other side of a link, where it counts: see `core/peers/whereabouts.py`."""
    return Source(link.peer, RELAYED if link.relayed else link.group)
