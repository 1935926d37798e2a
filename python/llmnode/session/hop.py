"""One hop of a session with its connection: sends what the hop's state says, and waits for the answers."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.errors import PeerError, PeerRefused, PeerUnreachable
from llmnode.session.saved import SavedHop
from llmnode.wire.frame import FrameType
from llmnode.wire.hop_state import HopState
from llmnode.wire.messages import Leased, RefusalCode, unpack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.ids import Epoch, PeerId, Step
    from llmnode.core.route import Hop
    from llmnode.swarm.expected import Expected
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.chunk import Chunk, Hidden
    from llmnode.wire.frame import Frame
    from llmnode.wire.hop_state import Request
    from llmnode.wire.session_terms import SessionTerms

    Introduce = Callable[[PeerConnection, PeerId], Awaitable[None]]
    """Tells the peer at a connection of another peer."""


QUIET_S = 4.0
"""A peer that has given no result to any session for this long may hang. One that is busy with others of ours has."""


class SessionHop(HopState):
    """Its methods raise PeerErrors that name peer and span, and are kept as `failure`."""

    def __init__(
        self,
        hop: Hop,
        connection: PeerConnection | None,
        terms: SessionTerms,
        session: SessionId | None = None,
        nonce: bytes = b"",
    ) -> None:
        """`session` is the name of an existing session, for `take_over`, and `nonce` what its receipts have.

        Only a lost hop has no connection.
        """
        super().__init__(hop, terms, session or SessionId(secrets.token_bytes(SESSION_ID_BYTES)))
        if connection is None:
            self.failure = PeerUnreachable("cannot be reached", peer=hop.peer, span=hop.span)
        self.nonce = nonce
        self.has_replacement: Callable[[float], Awaitable[bool]] | None = None
        """Says whether others that have computed since a time could take its place, and tries some if none have."""
        self.one_by_one = trio.Lock()
        """Held by the chunk whose output is waited for."""
        self._reached = connection
        self._declined: PeerConnection | None = None  # a better connection that the peer did not let us go to

    @property
    def connection(self) -> PeerConnection:
        """Raises the hop's failure if there is none."""
        if self._reached is None:
            assert self.failure is not None, "a hop without a connection has failed"
            raise self.failure
        return self._reached

    @property
    def saved(self) -> SavedHop:
        """The peer, and the name under which it keeps the session, if it does."""
        if not self.is_leased:
            return SavedHop(self.hop.peer, self.hop.span, None)
        return SavedHop(self.hop.peer, self.hop.span, self.session, self.nonce)

    def check_prompts(self) -> None:
        """Raises PeerRefused also if the peer has said before that it knows no prompts: they are not sent again."""
        super().check_prompts()
        if self.terms.prompts and not self.connection.knows_prompts:
            raise self.blame(PeerRefused(RefusalCode.UNKNOWN_EXTENSION, "has said that it knows no deep prompts"))

    async def carry_out(self, *requests: Request, introduce: Introduce | None = None) -> None:
        """Send the requests at once, and wait for their answers in the same order.

        Before the session opens, the peer gets its adapter.
        """
        with self.blamed():
            adapter, policy = self.terms.adapter, self.terms.policy
            send = partial(self._send, requests, introduce)
            if adapter is not None and any(each.frame.type is FrameType.OPEN for each in requests):
                await self.connection.adapters.using(adapter, self.hop.span, policy.step_timeout_s, send)
            else:
                await send()

    async def _send(self, requests: Sequence[Request], introduce: Introduce | None) -> None:
        with ExitStack() as stack:
            answers = []
            for request in requests:
                frame = request.frame
                if introduce is not None and request.introduces is not None:
                    await introduce(self.connection, request.introduces)
                if frame.type is FrameType.OPEN:
                    self.connection.take_session(self.session)
                answers.append(stack.enter_context(self.connection.expect(frame.session, frame.epoch, frame.step)))
                await self.connection.tell(frame)
            since_s = trio.current_time()
            for request, answer in zip(requests, answers, strict=True):
                try:
                    self.answered(request, await answer.receive(request.answer, request.timeout_s))
                except PeerRefused as refusal:
                    if request.frame.type is FrameType.OPEN:  # refusals that follow do not mean that it has ended
                        self.connection.sessions.pop(self.session, None)
                        if self.terms.prompts and refusal.code == RefusalCode.UNKNOWN_EXTENSION:
                            self.connection.knows_prompts = False
                    self.refused(request, refusal.after(trio.current_time() - since_s), trio.current_time())
                except PeerError as error:
                    error.after(trio.current_time() - since_s)
                    raise

    async def take_over(self, asked_in: Epoch, epoch: Epoch, position: int) -> None:
        """Have the existing session move to our connection. `asked_in` is an epoch that no hop was asked in.

        It must have stayed in `epoch`, where it only grew, and stand at `position` or beyond.
        """
        self.connection.take_session(self.session)
        with self.blamed():
            self.taken_over(await _ask(self.connection, self.resume(asked_in)), epoch, position)

    @property
    def has_better_connection(self) -> bool:
        """Its connection is relayed, and there is a direct one by now."""
        if self._reached is None or self.failure is not None:
            return False
        return self._reached.best not in (self._reached, self._declined)

    async def take_better_connection(self, epoch: Epoch, step: Step, position: int) -> None:
        """Go on over the better connection. Nothing is under way: the session stands at `position` of `epoch`.

        A peer that refuses, for example as its KV is full, is asked no more. Raises PeerError if the session is not as
        it was.
        """
        former, better = self.connection, self.connection.best
        better.take_session(self.session)
        with self.blamed():
            try:
                answer = await _ask(better, self.resume(epoch, step))
            except PeerRefused:
                better.sessions.pop(self.session, None)
                self._declined = better
                return
            self._reached = better
            former.sessions.pop(self.session, None)
            self.moved(answer, epoch, position)
            if self.is_leased:
                await self.get_lease(epoch, step)

    async def get_lease(self, epoch: Epoch, step: Step) -> float:
        """Ask that the session outlive our connection. Returns for how long it will, in seconds. Raises PeerError.

        A failure is not kept: the session goes on without a lease.
        """
        request = self.lease(epoch, step)
        answer = await _ask(self.connection, request)
        self.answered(request, answer)
        return unpack(Leased, answer.meta).lease_ms / 1000

    def reuse_or_new(self, others: Sequence[SessionHop]) -> SessionHop:
        """One of `others` that is at the same peer, with the same blocks, and well; else a new one, to be opened."""
        place = self.hop, self._reached
        well = (each for each in others if (each.hop, each._reached) == place and each.failure is None)
        if (hop := next(well, None)) is None:
            hop = SessionHop(self.hop, self._reached, self.terms)
            hop.promised, hop.has_replacement = self.promised, self.has_replacement
        return hop

    async def become_copy(self, opened: Epoch, request: Request) -> None:
        """Be the copy that `request` asks for. A new hop opens first. An error is kept as `failure`, and not raised."""
        with suppress(PeerError):
            if not self.is_open:
                await self.carry_out(self.open(opened, request.frame.start))
            await self.carry_out(request)

    def expect(self, chunk: Chunk) -> Expected:
        """From now to the end of the context, answers about `chunk` are kept when they come, whatever asks for them."""
        with self.blamed():
            return self.connection.expect(self.session, chunk.epoch, chunk.step)

    async def is_replaceable(self, since_s: float) -> bool:
        """Whether `has_replacement` says so, where an answer has been waited for since then.

        A peer that computes for another session of ours is only busy.
        """
        if self.has_replacement is None or trio.current_time() < self.connection.computed_s + QUIET_S:
            return False
        return await self.has_replacement(since_s)

    async def fetch(self, chunk: Chunk) -> Hidden:
        """The output of `chunk` out of its log. An error is not kept as the hop's failure."""
        answer = await _ask(self.connection, self.replay(chunk, push=False))
        return self.replayed(chunk, answer, push=False)

    async def close(self, *, keep: bool = False) -> None:
        """Tell the peer to free its KV, or to `keep` it for its lease. A peer that is gone has done so already."""
        try:
            await self.connection.tell(self.goodbye(keep=keep))
        except PeerError:
            return
        finally:
            if self._reached is not None:
                self._reached.sessions.pop(self.session, None)


async def _ask(connection: PeerConnection, request: Request) -> Frame:
    return await connection.ask(request.frame, request.answer, request.timeout_s)
