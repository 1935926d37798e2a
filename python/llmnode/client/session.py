"""An inference session: hidden states of one sequence, through every hop of a route, position by position.

Hidden states go from hop to hop directly; of each hop's input and output the digests come here, and must fit together.
A session outlives its servers (Petals, Algorithm 1): when a peer is lost, its inputs are given to who takes its place,
by the hop before, which has logged them, or by us. Whatever fails, all hops go back to the last position that all of
them had computed, under a new epoch, and the rest is done again.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import trio

from llmnode.client.flight import Contradiction, fly
from llmnode.client.hop import Chunk, SessionHop
from llmnode.client.recovery import Recovery, Trouble
from llmnode.client.saved import SavedSession
from llmnode.core.ids import Epoch, Step
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import (
    IntegrityError,
    LlmnodeError,
    LocalProtocolError,
    NoRoute,
    PeerError,
    PeerRefused,
    PeerUnreachable,
    SessionClosed,
    SessionLost,
    single_error,
)
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from llmnode.client.connection import Connection
    from llmnode.client.flight import Flight
    from llmnode.client.hop import HopTiming
    from llmnode.client.receipts import ReceiptBook
    from llmnode.client.recovery import Detours
    from llmnode.client.saved import SavedHop
    from llmnode.client.spot import SpotChecks
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Route
    from llmnode.wire.frame import Buffer
    from llmnode.wire.log import PayloadLog

log = logging.getLogger(__name__)


class InferenceSession:
    """Petals' primitive: `step` runs hidden states through all blocks and remembers them in the KV of every hop.

    Made by `open_session`. Not for several tasks at once, except that any may close it.
    """

    def __init__(
        self,
        model: ModelInfo,
        max_length: int,
        codec: Codec,
        policy: ClientPolicy,
        detours: Detours | None,
        book: ReceiptBook | None,
        spot: SpotChecks | None = None,
    ) -> None:
        self.max_length = max_length
        self.timings: Sequence[HopTiming] = ()
        """Of the latest step, one per hop."""
        self.recoveries: list[Recovery] = []
        self.receipts = book
        """Who computed what, as they signed it."""
        self.spot_checks = spot
        self._model = model
        self._form = HiddenForm(model.hidden_size, codec)
        self._policy = policy
        self._detours = detours
        self._hops: list[SessionHop] = []
        self._position = 0
        self._epoch = Epoch(0)
        self._step = Step(0)
        self._settled = True
        self._is_exported = False
        self._ended: LlmnodeError | None = None

    @property
    def position(self) -> int:
        """Number of positions in the KV of every hop."""
        return self._position

    @property
    def connections(self) -> Mapping[PeerId, Connection]:
        return {each.hop.peer: each.connection for each in self._hops}

    @property
    def route(self) -> Route:
        """The hops it goes through now."""
        return tuple(each.hop for each in self._hops)

    async def open(self, route: Route, connections: Mapping[PeerId, Connection]) -> None:
        self._hops = await self._open_hops(route, connections)
        await self._line_up([None, *self._hops, None])

    async def take_over(self, saved: SavedSession, connections: Mapping[PeerId, Connection]) -> None:
        """Instead of `open`: go on where `saved` stands, with the hops that are still there, and others for the rest.

        Raises NoRoute or SessionLost.
        """
        self._position, self._epoch, self._settled = saved.position, saved.epoch, False
        asked_in = self._begin_epoch()
        self._hops = [
            SessionHop(Hop(each.peer, each.span), connections.get(each.peer), self._form, self._policy, each.session)
            for each in saved.hops
        ]
        async with trio.open_nursery() as nursery:
            for hop, each in zip(self._hops, saved.hops, strict=True):
                nursery.start_soon(self._take_over, hop, each, asked_in, saved)
        self._hops = self._gaps_joined(self._hops)
        for payload, length in saved.log:
            self._hops[0].inputs.append(payload, length)
        await self._persist(trio.lowlevel.checkpoint, position_before=saved.position)

    async def step(self, hidden: Buffer) -> Buffer:
        """Append positions. hidden: (tokens, hidden_size) in fp32, as it leaves the embedding.

        Returns the same shape, as it leaves the last block. What crosses the wire is in the session's codec, in chunks
        of the policy's size, several under way at once. Peers that fail are replaced meanwhile. Raises SessionLost if
        that is of no use, after which only closing is left, as it is after a step that was cancelled; and NoRoute if
        nobody holds a lost peer's blocks: the session stands where it stood, and the same step may be tried again.
        """
        self._check_open()
        row_bytes = self._model.row_bytes
        length, rest = divmod(len(hidden), row_bytes)
        if rest or not length or self._position + length > self.max_length:
            raise LocalProtocolError(
                f"{len(hidden)} bytes ({row_bytes} a position) at position {self._position} of {self.max_length}"
            )
        waiting = deque(self._chunks(hidden))
        outputs: list[Buffer] = []
        with single_error():
            async with trio.open_nursery() as beside:
                if self.receipts is not None and self.receipts.pending >= self._policy.unverified_steps:
                    beside.start_soon(self.verify)
                await self._persist(lambda: self._stream(waiting, outputs), position_before=self._position)
        return outputs[0] if len(outputs) == 1 else bytearray().join(outputs)

    async def truncate(self, position: int) -> None:
        """Forget the positions from `position` on, at every hop. Raises as `step` does."""
        self._check_open()
        if not 0 <= position <= self._position:
            raise LocalProtocolError(f"cannot go back to position {position} from {self._position}")
        self._position = position
        self._settled = False
        if self.receipts is not None:
            self.receipts.truncate(position)
        await self._persist(trio.lowlevel.checkpoint, position_before=position)

    async def fork(self, targets: Sequence[InferenceSession]) -> None:
        """Make each of `targets`, other sessions of the same client, a copy of this one, whatever they were.

        It costs them a round trip, at whose end each goes its own way. Raises as `step` does, for any of them.
        """
        self._check_open()
        with single_error():
            async with trio.open_nursery() as nursery:
                for target in targets:
                    nursery.start_soon(target._become, self)

    async def verify(self) -> None:
        """Check what has been signed so far. A hop that has not signed what it computed is replaced with the next step.

        Steps do that beside others, a few at a time; call it when what is there is all there will be.
        """
        try:
            if self.receipts is not None:
                await self.receipts.verify_pending()
        except IntegrityError as error:
            log.warning("%s", error)
            for hop in self._hops:
                if hop.hop.peer == error.peer:
                    hop.blame(error)

    async def export(self, path: Path, token_ids: Sequence[int] = ()) -> float:
        """Save the session in the file at `path`, for `llmnode.resume` in another process; it may go on here too.

        Returns for how many seconds the servers keep its KV when this process has gone or closed it, 0 if some do not:
        then it is resumed by a replay of what is in the file. The file says where the session stands now, `token_ids`,
        which only the caller knows, and our key: whoever can read it can go on in our name. Raises ConfigError if it
        cannot be written.
        """
        self._check_open()
        if self._detours is None:
            raise LocalProtocolError("a session that knows no other peers cannot be saved")
        lease_s = await self._lease()
        model = self._model
        saved = SavedSession(
            model.name,
            model.digest,
            model.blocks,
            model.hidden_size,
            model.dtype,
            self._form.codec,
            self.max_length,
            self._position,
            self._epoch,
            tuple(self._hops[0].inputs.pieces(self._position)),
            tuple(hop.saved for hop in self._hops),
            tuple(token_ids),
        )
        await self._detours.save(saved, path)
        self._is_exported = True
        return lease_s

    async def close(self) -> None:
        """Tell every hop to free its KV; or, if the session was exported, to keep it for as long as was promised."""
        self._ended = self._ended or SessionClosed("closed")
        if self.spot_checks is not None:
            await self.spot_checks.close()
        for hop in self._hops:
            await hop.close(keep=self._is_exported)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionClosed(f"the session has ended: {self._ended}")

    @contextmanager
    def _ends_if_broken_off(self) -> Iterator[None]:
        """Some hops may have done their part and others not: going on would take a late answer for a new one."""
        try:
            yield
        except SessionLost as error:
            self._ended = error
            raise
        except LlmnodeError:
            raise
        except BaseException:  # a group, if it was cancelled while several hops were busy
            self._ended = SessionClosed("it was cancelled on the way through its hops")
            raise

    # The way through the hops

    def _chunks(self, hidden: Buffer) -> Iterator[tuple[Buffer, int]]:
        """Payloads and their lengths. They go on from hop to hop as they are: a lossy codec loses once, not twice."""
        row_bytes, most = self._model.row_bytes, self._policy.chunk_tokens
        for at in range(0, len(hidden), most * row_bytes):
            rows = memoryview(hidden)[at : at + most * row_bytes]
            yield bytes(self._form.encode(rows)), len(rows) // row_bytes  # logged, and `hidden` is the caller's

    async def _persist(self, work: Callable[[], Awaitable[None]], *, position_before: int) -> None:
        """Do `work` with all hops at the session's position, and the rest of it again after what could be mended."""
        trouble = Trouble()
        with self._ends_if_broken_off():
            while True:
                if self.spot_checks is not None:
                    self.spot_checks.raise_finding()
                try:
                    if (lost := self._first_lost()) is not None:
                        raise lost.failure or LocalProtocolError("who is lost has failed")
                    await self._settle()
                    return await work()
                except PeerError as error:
                    self._settled = False
                    try:
                        await self._recover(error, trouble)
                    except NoRoute:
                        self._position = position_before
                        raise

    async def _settle(self) -> None:
        """Have all hops stand at the session's position, in one epoch, and know their neighbours."""
        if not self._settled:
            self._begin_epoch()
            if self.receipts is not None:
                self.receipts.truncate(self._position)
            if self.spot_checks is not None:
                self.spot_checks.truncate(self._position)
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in self._hops:
                        nursery.start_soon(hop.align, self._epoch, self._step, self._position)
            await self._line_up([None, *self._hops, None])
            self._settled = True

    def _begin_epoch(self) -> Epoch:
        self._epoch = Epoch(self._epoch + 1)
        return self._epoch

    async def _line_up(self, chain: Sequence[SessionHop | None], *, quiet: bool = False) -> None:
        """Tell each hop of `chain`, except its ends, its neighbours. `quiet`: nobody wants what the last puts out."""
        with single_error():
            async with trio.open_nursery() as nursery:
                for before, hop, after in zip(chain, chain[1:], chain[2:], strict=False):
                    if hop is not None:
                        nursery.start_soon(self._introduce, before, hop, after, quiet and after is None)

    async def _introduce(
        self, before: SessionHop | None, hop: SessionHop, after: SessionHop | None, quiet: bool
    ) -> None:
        if not self._policy.push:
            before = after = None
        introduce = self._detours.introduce if self._detours is not None else None
        await hop.stand_between(before, after, self._epoch, self._step, quiet=quiet, introduce=introduce)

    async def _stream(self, waiting: deque[tuple[Buffer, int]], outputs: list[Buffer]) -> None:
        """All of `waiting` through all hops, several chunks under way; what has passed them goes over to `outputs`."""
        if len(waiting) == 1:
            payload, length = waiting[0]
            flight = await fly(self._hops, self._chunk(self._step, self._position, length), payload, self._policy)
            outputs.append(await self._land(flight))
            return
        window = trio.Semaphore(self._policy.chunks_ahead)
        start, step, landed = self._position, self._step, trio.Event()
        landed.set()

        async def pass_all(
            chunk: Chunk, payload: Buffer, first: trio.Event, done: trio.Event, *, task_status: trio.TaskStatus[None]
        ) -> None:
            flight = await fly(self._hops, chunk, payload, self._policy, task_status)
            await first.wait()  # they land in order
            outputs.append(await self._land(flight))
            waiting.popleft()
            done.set()
            window.release()

        with single_error():
            async with trio.open_nursery() as nursery:
                for number, (payload, length) in enumerate(list(waiting)):
                    await window.acquire()
                    first, landed = landed, trio.Event()
                    chunk = self._chunk(step + number, start, length)
                    await nursery.start(pass_all, chunk, payload, first, landed)
                    start += length

    async def _land(self, flight: Flight) -> Buffer:
        """All hops have computed the chunk: the session stands after it now. Returns what it became, in fp32."""
        assert flight.output.payload is not None, "the last hop keeps no outputs"
        output = decode_hidden(flight.output.payload, self._form.codec, flight.chunk.length * self._model.hidden_size)
        await self._take_receipts(flight, self._hops, replay=False)
        self._log(flight, self._hops, None)
        self._position += flight.chunk.length
        self._step = Step(self._step + 1)
        self.timings = [each.timing for each in flight.outputs]
        if self.spot_checks is not None:
            self.spot_checks.landed(flight, self._hops)
        return output

    async def _take_receipts(self, flight: Flight, hops: Sequence[SessionHop], *, replay: bool) -> None:
        """Raises IntegrityError, the `failure` of its hop, if it must be sure of their signatures and one is bad."""
        if (book := self.receipts) is None:
            return
        receipts = [hop.receipt(book, flight.chunk, each.said) for hop, each in zip(hops, flight.outputs, strict=True)]
        if self._policy.strict:
            for hop, receipt in zip(hops, receipts, strict=True):
                with hop.blamed():
                    await book.check([receipt])
        given, got = flight.inputs[0].digest, flight.output.digest
        book.add(receipts, given, got, replay=replay, verified=self._policy.strict)

    def _log(self, flight: Flight, hops: Sequence[SessionHop], before: SessionHop | None) -> None:
        """Keep what `hops` were given, as far as the hop before each does not."""
        for hop, hidden in zip(hops, flight.inputs, strict=True):
            if before is None or not self._policy.upstream_logs:
                assert hidden.payload is not None
                hop.inputs.append(hidden.payload, flight.chunk.length)
            before = hop

    async def _become(self, source: InferenceSession) -> None:
        """Be a copy of `source`, at its peers; where that fails, others are given its inputs as if a hop were lost."""
        self._check_open()
        position = source._position
        if (source._model, source._form) != (self._model, self._form) or position > self.max_length:
            raise LocalProtocolError(f"no room for {position} positions of another session, or of another form")
        hops = [hop.beside(self._hops) for hop in source._hops]
        shared = min(self._position, position, self._hops[0].inputs.shared_with(source._hops[0].inputs))
        if self._settled and hops == self._hops and shared == self._position == position:
            return
        with self._ends_if_broken_off():
            await self._abandon([hop for hop in self._hops if hop not in hops])
            self._hops, self._position, self._settled = hops, position, True
            self._begin_epoch()  # of those that are opened
            at = self._begin_epoch(), self._step, position
            if self.receipts is not None:
                self.receipts.become(source.receipts, position)
            if self.spot_checks is not None:
                self.spot_checks.truncate(0)  # what is being checked has gone
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop, other in zip(hops, source._hops, strict=True):
                        nursery.start_soon(hop.become, other, shared, self._model, self.max_length, *at)
            if self._ended is not None:  # nobody else would close those that were opened since
                await self._abandon(hops)
                self._check_open()
        await self._persist(lambda: self._line_up([None, *self._hops, None]), position_before=position)

    # From process to process

    async def _lease(self) -> float:
        """Ask all hops to outlive us, for as long as is returned. Who does not, or has failed, is recovered later."""
        granted_s = [0.0] * len(self._hops)

        async def ask(index: int, hop: SessionHop) -> None:
            try:
                granted_s[index] = await hop.lease(self._epoch, self._step)
            except PeerError as error:
                log.info("no lease: %s", error)

        # Who has lost its place in the session, or logs nothing for the next hop, would be of no use.
        if self._settled and self._policy.upstream_logs:
            async with trio.open_nursery() as nursery:
                for index, hop in enumerate(self._hops):
                    if hop.failure is None:
                        nursery.start_soon(ask, index, hop)
        return min(granted_s)

    async def _take_over(self, hop: SessionHop, each: SavedHop, asked_in: Epoch, saved: SavedSession) -> None:
        """What fails is the hop's failure."""
        if each.session is None or not self._policy.upstream_logs:
            hop.blame(PeerRefused(RefusalCode.UNKNOWN_SESSION, "has not kept the session"))
        if hop.failure is not None:
            return
        try:
            await hop.take_over(self._model, asked_in, saved.epoch, saved.position)
        except PeerError as error:
            log.info("not taken over: %s", error)
            await hop.close()
            if self._detours is not None:
                self._detours.report(error)

    def _gaps_joined(self, hops: Sequence[SessionHop]) -> list[SessionHop]:
        """With one lost hop for all that follow each other: they are replaced by one replay.

        Nobody's failure: who does not have the session any more may well take its place.
        """
        joined: list[SessionHop] = []
        for is_lost, group in groupby(hops, lambda hop: hop.failure is not None):
            members = list(group)
            if is_lost:
                span = Span(members[0].hop.span.start, members[-1].hop.span.end)
                gap = SessionHop(Hop(members[0].hop.peer, span), None, self._form, self._policy)
                gap.failure = PeerUnreachable("the session that was saved is not there any more", span=span)
                members = [gap]
            joined += members
        return joined

    # Recovery

    async def _recover(self, error: PeerError, trouble: Trouble) -> None:
        """Put others in the place of all hops that have failed. Raises SessionLost or NoRoute."""
        if isinstance(error, IntegrityError) and self._first_lost() is None:
            log.warning("%s", error)
            self._judge(error)
        lost = self._first_lost()
        if lost is None and isinstance(error, IntegrityError):
            return  # it happens once to any two: what goes between them does so by way of us now
        if self._detours is None or lost is None:
            raise SessionLost([error]) from error
        trouble.deadline_s = min(trouble.deadline_s, trio.current_time() + self._policy.recovery_timeout_s)
        while lost is not None:  # the first first: it has what the next one was given
            await self._replace(lost, self._detours, trouble)
            lost = self._first_lost()

    def _judge(self, error: IntegrityError) -> None:
        """Two hops contradict each other. What both have signed may prove which one lies; else both are suspected."""
        if isinstance(error, Contradiction) and error.shown is not None and self.receipts is not None:
            told = error.upstream.receipt(self.receipts, error.chunk, error.told)
            shown = error.shown.shown_input, error.shown.input_digest, error.shown.shown_signature
            try:
                if (conviction := self.receipts.echo(told, error.hop.hop, *shown)) is not None:
                    error.upstream.blame(conviction.error())
                    return
            except IntegrityError as doubt:
                log.warning("%s", doubt)
        if self._detours is not None:
            self._detours.suspect(error.suspects)

    def _first_lost(self) -> SessionHop | None:
        return next((hop for hop in self._hops if hop.failure is not None), None)

    async def _replace(self, lost: SessionHop, detours: Detours, trouble: Trouble) -> None:
        """Have others in the place of `lost`; or return because of the hop before, which is then lost too."""
        began, index = trio.current_time(), self._hops.index(lost)
        before = self._hops[index - 1] if index else None
        assert lost.failure is not None
        lost.inputs.truncate(self._position)
        trouble.note(lost.failure, detours)
        await self._abandon([lost])  # if it lives it may be asked to take its own place, and has no room for both
        missing: NoRoute | None = None
        hurry = False
        while self._ended is None and trio.current_time() < trouble.deadline_s:
            try:
                with trio.fail_at(trouble.deadline_s):
                    route, connections = await detours.find(lost.hop.span, trouble.failed, hurry=hurry)
                    hops = await self._rebuild(index, route, connections)
            except NoRoute as found:
                missing = found
                if hurry:  # everybody has been asked
                    log.warning("%s; trying again for %.0f s", found, trouble.deadline_s - trio.current_time())
                    with trio.move_on_after(self._policy.retry_s):
                        await detours.wait_changed()
                    trouble.failed.clear()  # they may be back, or have room, by now
                hurry = not hurry
            except PeerError as failure:
                if before is not None and before.failure is not None:
                    return
                missing = None
                trouble.note(failure, detours)
            except trio.TooSlowError:
                break
            else:
                self._hops[index : index + 1] = hops
                self._note_recovery(lost, hops, trio.current_time() - began)
                return
        self._check_open()
        raise missing or NoRoute([lost.hop.span], hint=str(trouble.causes[-1]))

    async def _rebuild(self, index: int, route: Route, connections: Mapping[PeerId, Connection]) -> list[SessionHop]:
        """New hops that have computed what the hop at `index` was given. Raises PeerError.

        In an epoch of their own, so that what they are given by mistake or too late is never taken for something else.
        """
        until_lost = [None, *self._hops[:index]]
        epoch = self._begin_epoch()
        hops = await self._open_hops(route, connections)
        try:
            if self._policy.upstream_logs:
                await self._line_up([*until_lost[-2:], *hops, None], quiet=True)
            start = 0
            flights: list[Flight] = []
            for step, (origin, length) in enumerate(self._replays(until_lost[-1], self._hops[index].inputs)):
                flight = await fly(hops, Chunk(epoch, Step(step), start, length), origin, self._policy)
                self._log(flight, hops, until_lost[-1])
                flights.append(flight)
                start += length
            for flight in flights:  # of a replay that was given up, nothing is kept
                await self._take_receipts(flight, hops, replay=True)
            self._check_open()  # nobody would close these
        except BaseException:
            await self._abandon(hops)
            raise
        return hops

    def _replays(self, before: SessionHop | None, logged: PayloadLog) -> Iterator[tuple[Buffer | SessionHop, int]]:
        """All positions of the session, in chunks: who has them, or the payload, and how many."""
        most = self._policy.chunk_tokens
        if before is None or not self._policy.upstream_logs:
            yield from logged.chunks(most)
        else:
            for start in range(0, self._position, most):
                yield before, min(most, self._position - start)

    async def _open_hops(self, route: Route, connections: Mapping[PeerId, Connection]) -> list[SessionHop]:
        """Raises the PeerError of one that does not open; then none is left open."""
        hops = [SessionHop(hop, connections[hop.peer], self._form, self._policy) for hop in route]
        try:
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in hops:
                        nursery.start_soon(hop.open, self._model, self.max_length, self._epoch)
        except BaseException:
            await self._abandon(hops)
            raise
        return hops

    async def _abandon(self, hops: Sequence[SessionHop]) -> None:
        with trio.move_on_after(self._policy.open_timeout_s, shield=True):
            for hop in hops:
                await hop.close()

    def _note_recovery(self, lost: SessionHop, hops: Sequence[SessionHop], stall_s: float) -> None:
        others = tuple(each.hop.peer for each in hops)
        cause = str(lost.failure)
        self.recoveries.append(Recovery(lost.hop.peer, lost.hop.span, others, self._position, stall_s, cause))
        log.info("recovered span=%s positions=%d in %.3f s: %s", lost.hop.span, self._position, stall_s, cause)

    def _chunk(self, step: int, start: int, length: int) -> Chunk:
        return Chunk(self._epoch, Step(step), start, length)


@asynccontextmanager
async def resume_session(
    saved: SavedSession,
    connections: Mapping[PeerId, Connection],
    model: ModelInfo,
    policy: ClientPolicy,
    detours: Detours,
    book: ReceiptBook,
    spot: SpotChecks | None = None,
) -> AsyncIterator[InferenceSession]:
    """The session that was `saved`, at whichever of its hops there are `connections` to; closed with the context.

    Raises NoRoute if nobody holds the blocks of the others, SessionLost if that is of no use.
    """
    session = InferenceSession(model, saved.max_length, saved.codec, policy, detours, book, spot)
    async with _closed_at_last(session, policy):
        await session.take_over(saved, connections)
        yield session


@asynccontextmanager
async def open_session(
    route: Route,
    connections: Mapping[PeerId, Connection],
    model: ModelInfo,
    max_length: int,
    codec: Codec,
    policy: ClientPolicy,
    detours: Detours | None = None,
    book: ReceiptBook | None = None,
    spot: SpotChecks | None = None,
) -> AsyncIterator[InferenceSession]:
    """Open a session with KV for `max_length` positions at every hop; it is closed with the context.

    Without `detours` it ends with the first peer that it loses; without a `book` receipts are not kept; without `spot`
    nothing is computed twice. Raises the PeerError of the first hop that does not open.
    """
    session = InferenceSession(model, max_length, codec, policy, detours, book, spot)
    async with _closed_at_last(session, policy):
        await session.open(route, connections)
        yield session


@asynccontextmanager
async def _closed_at_last(session: InferenceSession, policy: ClientPolicy) -> AsyncIterator[None]:
    try:
        yield
    finally:
        with trio.move_on_after(policy.open_timeout_s, shield=True):
            await session.close()
