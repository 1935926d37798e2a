"""A client's side of one hop of a session: asks its peer, checks its answers, and logs what it was given."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.core.ids import NO_SESSION, SESSION_ID_BYTES, Epoch, PeerId, SessionId, Step
from llmnode.core.peers.peer_speed import PeerSpeed
from llmnode.errors import PeerError, PeerRefused, PeerUnreachable, RemoteProtocolError
from llmnode.session.push_state import PushState
from llmnode.session.saved import SavedHop
from llmnode.wire.chunk import Hidden, HopOutput, HopTiming
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.log import PayloadLog
from llmnode.wire.messages import (
    Fork,
    Lease,
    Leased,
    Neighbours,
    Open,
    RefusalCode,
    Replay,
    Replayed,
    Result,
    Resumed,
    pack,
    unpack,
)
from llmnode.wire.profile import profile_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from llmnode.core.route import Hop
    from llmnode.receipts.book import ReceiptBook, TakenIn
    from llmnode.session.terms import SessionTerms
    from llmnode.swarm.peer_connection import Expected, PeerConnection
    from llmnode.wire.chunk import Chunk
    from llmnode.wire.frame import Buffer
    from llmnode.wire.receipt import Receipt

    Introduce = Callable[[PeerConnection, PeerId], Awaitable[None]]
    """Tells who is at a connection of another peer."""


class SessionHop:
    """One peer's part of a session. What it raises is a PeerError that names peer and span, and is kept as `failure`.

    Its name is its own: who replaces a peer, perhaps the same one in its next life, starts with a name never used.
    """

    def __init__(
        self,
        hop: Hop,
        connection: PeerConnection | None,
        terms: SessionTerms,
        session: SessionId | None = None,
    ) -> None:
        """`session` is the name of one that there is, for `take_over`. Only who is lost has no connection."""
        self.hop = hop
        self.inputs = PayloadLog(terms.form)
        """What it was given, of the positions that all hops have computed, as far as it is logged here."""
        self.failure: PeerError | None = None
        if connection is None:
            self.failure = PeerUnreachable("cannot be reached", peer=hop.peer, span=hop.span)
        self.pushing = PushState(terms.policy.push)
        self.pace = PeerSpeed()
        self.one_by_one = trio.Lock()
        """Held by the chunk whose output is waited for."""
        self._reached = connection
        self._is_open = False
        self._terms = terms
        self._form = terms.form
        self._policy = terms.policy
        self._session = session or SessionId(secrets.token_bytes(SESSION_ID_BYTES))
        self._neighbours: Neighbours | None = None  # as it was told, and does
        self._keeps_outputs = False
        self._is_leased = False
        self._declined: PeerConnection | None = None  # a better way that the peer did not let us go

    @property
    def connection(self) -> PeerConnection:
        """Raises the hop's failure if there is none."""
        if self._reached is None:
            assert self.failure is not None, "who has no connection has failed"
            raise self.failure
        return self._reached

    @property
    def saved(self) -> SavedHop:
        """Who it is, and under which name its peer keeps it, if it does."""
        return SavedHop(self.hop.peer, self.hop.span, self._session if self._is_leased else None)

    async def open(self, epoch: Epoch, stand: Callable[..., Awaitable[None]] | None = None) -> None:
        """In one round trip with `stand`, which is `set_neighbours` but for its `first`."""
        model = self._terms.model
        self._keeps_outputs = self._policy.recovery.upstream_logs and self.hop.span.end < model.blocks
        request = Open(
            **profile_fields(model.profile),
            span_start=self.hop.span.start,
            span_end=self.hop.span.end,
            max_length=self._terms.max_length,
            codec=self._form.codec,
            priority=self._policy.priority.word,
            keep_outputs=self._keeps_outputs,
        )
        frame = Frame(FrameType.OPEN, self._session, epoch, meta=pack(request))
        self.connection.sessions.add(self._session)
        with self.blamed(), self.connection.expect(frame.session, frame.epoch, frame.step) as answer:
            await self.connection.tell(frame)

            async def is_open() -> None:
                await answer.receive(FrameType.OPENED, self._policy.open_timeout_s)
                self._is_open = True

            await (is_open() if stand is None else stand(first=is_open))

    async def take_over(self, asked_in: Epoch, epoch: Epoch, position: int) -> None:
        """Have the session that there is move to our connection. `asked_in` is an epoch that nobody was asked in.

        It must have stayed in `epoch`, where it only grew, and stand at `position` or beyond.
        """
        self._keeps_outputs = self._policy.recovery.upstream_logs and self.hop.span.end < self._terms.model.blocks
        self.connection.sessions.add(self._session)
        with self.blamed():
            frame = Frame(FrameType.RESUME, self._session, asked_in)
            answer = await self.connection.ask(frame, FrameType.RESUMED, self._policy.open_timeout_s)
            stands = unpack(Resumed, answer.meta)
            self._is_open = True
            if stands.epoch != epoch or stands.position < position:
                raise PeerRefused(RefusalCode.UNKNOWN_SESSION, f"has gone back, to {stands.position} or before")

    @property
    def has_better_way(self) -> bool:
        """Its connection is relayed, and there is a direct one by now."""
        if self._reached is None or self.failure is not None:
            return False
        return self._reached.best not in (self._reached, self._declined)

    async def take_better_way(self, epoch: Epoch, step: Step, position: int) -> None:
        """Go on over the better connection. Nothing is under way: the session stands at `position` of `epoch`.

        A peer that refuses, as for want of room, is asked no more. Raises PeerError if the session is not as it was.
        """
        former, better = self.connection, self.connection.best
        better.sessions.add(self._session)
        with self.blamed():
            try:
                frame = Frame(FrameType.RESUME, self._session, epoch, step)
                answer = await better.ask(frame, FrameType.RESUMED, self._policy.open_timeout_s)
            except PeerRefused:
                better.sessions.discard(self._session)
                self._declined = better
                return
            self._reached = better
            former.sessions.discard(self._session)
            stands = unpack(Resumed, answer.meta)
            if (stands.epoch, stands.position) != (epoch, position):
                raise RemoteProtocolError(f"stands at {stands.position} of epoch {stands.epoch} all of a sudden")
            if self._is_leased:
                await self.lease(epoch, step)

    async def lease(self, epoch: Epoch, step: Step) -> float:
        """Ask that the session outlive our connection. Returns for how long it will, in seconds. Raises PeerError."""
        self._is_leased = False
        answer = await self.connection.ask(
            self._lease_frame(epoch, step, leaves=False), FrameType.LEASED, self._policy.open_timeout_s
        )
        granted_s = unpack(Leased, answer.meta).lease_ms / 1000
        self._is_leased = granted_s > 0
        return granted_s

    async def align(self, epoch: Epoch, step: Step, position: int) -> None:
        """Have the KV end at `position`, whatever was computed beyond; the next step is to be `step` of `epoch`."""
        self.inputs.truncate(position)
        frame = Frame(FrameType.TRUNCATE, self._session, epoch, step, start=position)
        with self.blamed():  # it may have to finish a long forward first
            await self.connection.ask(frame, FrameType.TRUNCATED, self._policy.step_timeout_s)

    def beside(self, others: Sequence[SessionHop]) -> SessionHop:
        """One of `others` that is at the same peer, with the same blocks, and well; else a new one, to be opened."""
        place = self.hop, self._reached
        well = (each for each in others if (each.hop, each._reached) == place and each.failure is None)
        return next(well, None) or SessionHop(self.hop, self._reached, self._terms)

    async def become(
        self,
        source: SessionHop,
        shared: int,
        epoch: Epoch,
        step: Step,
        position: int,
    ) -> None:
        """Have KV and log be those of `source`, which this hop is `beside`, up to `position`; if new, it opens first.

        The first `shared` positions are the same already. If that fails, it is kept as `failure`, and not raised.
        """
        self.inputs = source.inputs.copy()
        self.inputs.truncate(position)
        request = Fork(source=source._session, shared=shared if self._is_open else 0)
        frame = Frame(FrameType.FORK, self._session, epoch, step, start=position, meta=pack(request))
        with suppress(PeerError), self.blamed():
            if not self._is_open:
                await self.open(Epoch(epoch - 1))
            await self.connection.ask(frame, FrameType.FORKED, self._policy.step_timeout_s)

    async def set_neighbours(
        self,
        before: SessionHop | None,
        after: SessionHop | None,
        epoch: Epoch,
        step: Step,
        *,
        quiet: bool = False,
        introduce: Introduce | None = None,
        first: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """Take steps from the hop before, and push results to the one after, as far as they can reach each other.

        If `quiet`, the results of this hop are wanted by nobody: they are but logged where they are. `introduce` has
        this hop's server hear of the next one first, for it pushes to nobody that it does not know. What is waited for
        `first` is the answer to what was asked before.
        """
        receiver = after if after is not None and self.pushing.is_wanted_to(after.hop.peer) else None
        request = Neighbours(
            sender=before.hop.peer if before else "",
            receiver=receiver.hop.peer if receiver else "",
            receiver_session=receiver._session if receiver else NO_SESSION,
            quiet=quiet,
            again=False,
        )
        if request == self._neighbours:
            return await first()
        self.pushing.receiver = self._neighbours = None  # if this is cancelled, who knows what it does
        with self.blamed():
            if introduce is not None and receiver is not None:
                await introduce(self.connection, receiver.hop.peer)
            self._neighbours = await self._tell_neighbours(request, epoch, step, first)
        self.pushing.receiver = PeerId(self._neighbours.receiver) if self._neighbours.receiver else None

    async def _tell_neighbours(
        self, request: Neighbours, epoch: Epoch, step: Step, first: Callable[[], Awaitable[None]]
    ) -> Neighbours:
        """Returns what it does."""
        meta = pack(replace(request, again=self.pushing.has_failed_to(request.receiver)))
        frame = Frame(FrameType.NEIGHBOURS, self._session, epoch, step, meta=meta)
        with self.connection.expect(frame.session, frame.epoch, frame.step) as answer:
            await self.connection.tell(frame)
            await first()
            try:
                await answer.receive(FrameType.FORWARDED, self._policy.step_timeout_s)
            except PeerRefused as refusal:
                if refusal.code != RefusalCode.CANNOT_FORWARD:
                    raise
                self.pushing.fail(PeerId(request.receiver), refusal.retry_after_s)
                return replace(request, receiver="", receiver_session=NO_SESSION)
        return request

    def note_not_pushed(self) -> None:
        """A push of its got lost, or was not made. From now on, and for a while, its results come by way of us."""
        if self.pushing.receiver is not None:
            self.pushing.fail(self.pushing.receiver)
            self._neighbours = None  # it may go on pushing until it is told something else

    @property
    def most_step_positions(self) -> int:
        """Of more, servers do not push all through relays."""
        return self._policy.relayed.step_positions

    @contextmanager
    def expect(self, chunk: Chunk) -> Iterator[ExpectedOutput]:
        """Within the context, the output for `chunk` is kept when it comes, whoever gives this hop its input."""
        with ExitStack() as stack:
            with self.blamed():
                expected = self.connection.expect(self._session, chunk.epoch, chunk.step)
                answer = stack.enter_context(expected)
            yield ExpectedOutput(self, chunk, answer)

    async def close(self, *, keep: bool = False) -> None:
        """Tell the peer to free its KV, or to `keep` it for its lease. One that is gone has done so already."""
        goodbye = Frame(FrameType.CLOSE, self._session)
        if keep and self._is_leased:
            goodbye = self._lease_frame(Epoch(0), Step(0), leaves=True)
        try:
            await self.connection.tell(goodbye)
        except PeerError:
            return
        finally:
            if self._reached is not None:
                self._reached.sessions.discard(self._session)

    def _lease_frame(self, epoch: Epoch, step: Step, *, leaves: bool) -> Frame:
        request = Lease(int(1000 * self._policy.recovery.lease_s), leaves)
        return Frame(FrameType.LEASE, self._session, epoch, step, meta=pack(request))

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Whatever fails within is this hop's failure."""
        try:
            yield
        except PeerError as error:
            self.blame(error)
            raise

    def blame(self, error: PeerError) -> PeerError:
        """It is this hop's failure. Returns it."""
        blamed = error.blame(self.hop.peer, self.hop.span)
        self.failure = self.failure or blamed
        return blamed

    def timeout_s(self, positions: int) -> float:
        """How long it may take for a step, by what it took before."""
        policy, expected_s = self._policy, self.pace.expected_s(positions)
        if expected_s is None:
            return policy.step_timeout_s
        return min(policy.step_timeout_s, policy.step_patience_s + policy.step_patience_times * expected_s)

    def receipt(self, book: ReceiptBook, chunk: Chunk, said: Result) -> Receipt:
        """What it has signed, if it has. Raises IntegrityError for what is no signature."""
        return book.receipt(self.hop, self._session, chunk, said.input_digest, said.output_digest, said.signature)

    def taken_in(self, book: ReceiptBook) -> list[TakenIn]:
        """What it has signed to have computed, in this session."""
        return book.taken_in(self._session)

    def is_named(self, session: SessionId | None) -> bool:
        """Whether that is its own name of the session."""
        return session == self._session

    async def ask(self, kind: FrameType, chunk: Chunk, meta: bytes = b"", payload: Buffer = b"") -> None:
        """Send a frame about `chunk`."""
        header = chunk.epoch, chunk.step, chunk.start, chunk.length
        await self.connection.tell(Frame(kind, self._session, *header, meta, payload, self._form.value_bytes))

    def read(self, chunk: Chunk, answer: Frame, output_digest: bytes, *, pushed: bool) -> Hidden:
        """What the hop puts out. Raises RemoteProtocolError."""
        if (answer.start, answer.length) != (chunk.start, chunk.length):
            raise RemoteProtocolError("answered for other positions than it was asked for")
        if not answer.payload and (self._is_quiet or (pushed and self._keeps_outputs)):
            return Hidden(output_digest, None, pushed)
        self._form.check(answer)
        self._form.check_values(answer)  # the next hop would refuse them, and be blamed
        if output_digest != _native.blake3_digest(answer.payload):
            raise RemoteProtocolError("sent other hidden states than it says")
        return Hidden(output_digest, answer.payload, pushed)

    @property
    def _is_quiet(self) -> bool:
        return self._neighbours is not None and self._neighbours.quiet


class ExpectedOutput:
    """One hop's output for one chunk. Made by `SessionHop.expect`."""

    def __init__(self, hop: SessionHop, chunk: Chunk, answer: Expected) -> None:
        self._hop = hop
        self.chunk = chunk
        self._answer = answer
        self._direct = True

    async def give(self, payload: Buffer) -> None:
        """Give the hop its input. Raises PeerError."""
        self._direct = False
        await self._hop.ask(FrameType.STEP, self.chunk, payload=payload)

    async def receive(self, timeout_s: float) -> HopOutput:
        """Of what input, is not checked. Raises PeerError; after PeerTimeout it may be waited for again."""
        async with self._hop.one_by_one:  # or the first of several chunks would use up the time of all
            since_s = trio.current_time()
            answer = await self._answer.receive(FrameType.RESULT, timeout_s)
        result = unpack(Result, answer.meta)
        if not result.pushed and self.chunk.length <= self._hop.most_step_positions:
            self._hop.note_not_pushed()
        hidden = self._hop.read(self.chunk, answer, result.output_digest, pushed=result.pushed)
        trip_us = int(1e6 * (trio.current_time() - since_s))
        hop = self._hop.hop
        timing = HopTiming(hop.peer, hop.span, trip_us, result.queue_us, result.compute_us, self._direct)
        return HopOutput(hidden, result, timing)

    async def replay(self, timeout_s: float, asked: Callable[[], None] = lambda: None, *, push: bool) -> Hidden:
        """The output again, from the hop's log: pushed to the next hop if that can be done and is wanted.

        `asked` is called once it has been asked for.
        """
        await self._hop.ask(FrameType.REPLAY, self.chunk, pack(Replay(push)))
        asked()
        answer = await self._answer.receive(FrameType.REPLAYED, timeout_s)
        replayed = unpack(Replayed, answer.meta)
        return self._hop.read(self.chunk, answer, replayed.output_digest, pushed=push and replayed.pushed)
