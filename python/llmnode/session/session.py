"""An inference session: hidden states of one sequence, through every hop of a route, position by position.

Hidden states go from hop to hop directly. The digests of each hop's input and output come here, and must fit together.
A session outlives its servers (Petals, Algorithm 1). When a peer is lost, its inputs are replayed to the peer that
takes its place, by the hop before, which has logged them, or by the client. After a failure all hops go back to the
last position that all of them had computed, under a new epoch, and the rest is done again.

Where the session stands, and which frames it sends, is in `wire/session_state.py`, which knows no clock and no task.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.errors import (
    IntegrityError,
    LlmnodeError,
    LocalProtocolError,
    NoRoute,
    NumericOverflow,
    PeerError,
    SessionClosed,
    SessionLost,
    single_error,
)
from llmnode.session import handover
from llmnode.session.chunk_run import run_chunk, run_chunks
from llmnode.session.failures import LetGo, StepFailures
from llmnode.session.hops import SessionHops
from llmnode.session.moving import Moving
from llmnode.session.overflow import Given, OverflowClaims, not_sent
from llmnode.session.recovery import Recoverer
from llmnode.session.rows import Rows
from llmnode.session.tools import SessionTools
from llmnode.wire.payload import decode_hidden

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Route
    from llmnode.session.better_routes import Moved
    from llmnode.session.failures import Recovery
    from llmnode.session.saved import SavedSession
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.chunk import HopTiming
    from llmnode.wire.chunk_path import ChunkResult
    from llmnode.wire.frame import Buffer
    from llmnode.wire.session_terms import SessionTerms

log = logging.getLogger(__name__)


class InferenceSession:
    """Petals' primitive: `step` runs hidden states through all blocks and remembers them in the KV of every hop.

    Made by `open_session`. Not for several tasks at once, except that any may close it.
    """

    def __init__(self, terms: SessionTerms, tools: SessionTools, rows: Rows | None = None) -> None:
        """`rows` are the sessions that were opened beside each other, if this is one of them."""
        self.timings: Sequence[HopTiming] = ()
        """Where the time of the latest step went, one per hop."""
        self.receipts = tools.book
        """The signatures of the hops for what each has computed."""
        self.spot_checks = tools.spot_checks
        self._policy = terms.policy
        self._finder = tools.finder
        self._hops = SessionHops(terms, tools)
        self._state = self._hops.state
        self.rows = rows or Rows()
        """The sessions that were opened beside each other, and this one."""
        self._recoverer = Recoverer(self._hops, self.rows)
        self._moving = Moving(self._hops, self.rows)
        self._is_exported = False

    @property
    def position(self) -> int:
        """Number of positions in the KV of every hop."""
        return self._state.position

    @property
    def memory_refusals(self) -> int:
        """The chunks that its hops had no memory for, and were given again."""
        return sum(hop.memory_refusals for hop in self._hops.hops)

    @property
    def max_length(self) -> int:
        """Number of positions that there is KV for."""
        return self._hops.terms.max_length

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that it was opened with."""
        return self._hops.terms.adapter

    @property
    def route(self) -> Route:
        """The hops it goes through now."""
        return tuple(each.hop for each in self._hops.hops)

    @property
    def connections(self) -> Mapping[PeerId, PeerConnection]:
        """The connections to the peers of the route."""
        return {each.hop.peer: each.connection for each in self._hops.hops}

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """In the order in which peers were lost."""
        return self._recoverer.recoveries

    @property
    def moves(self) -> Sequence[Moved]:
        """Its moves to better peers."""
        return self._hops.moves

    async def open(self, route: Route, connections: Mapping[PeerId, PeerConnection]) -> None:
        """Open the session at every hop of `route`, over `connections` to their peers.

        Raises the PeerError of the first hop that does not open.
        """
        await self._hops.open(route, connections)
        self.rows.add(self._hops)

    async def take_over(self, saved: SavedSession, connections: Mapping[PeerId, PeerConnection]) -> None:
        """Instead of `open`: go on where `saved` stands, with the hops that are still there, and others for the rest.

        `connections` are those to the peers that can be reached. Raises NoRoute or SessionLost.
        """
        assert self._finder is not None, "what was saved may have gone"
        await handover.take_over(self._hops, saved, connections, self._finder)
        self.rows.add(self._hops)
        await self._persist(trio.lowlevel.checkpoint, position_before=saved.position)

    async def step(self, hidden: Buffer) -> Buffer:
        """Append positions. `hidden` is (tokens, hidden_size) in fp32, as it leaves the embedding.

        Returns the same shape, as it leaves the last block. It crosses the wire in the session's codec, in chunks of
        the policy's size, several at once. Peers that fail are replaced meanwhile. Raises SessionLost if no replacement
        helps: then the session can only be closed, as after a step that was cancelled. Raises NoRoute if nobody holds a
        lost peer's blocks, NumericOverflow if blocks cannot compute with what they are given, and ConfigError if a
        relay may not carry this many bytes. After any of these the session stands where it stood, and the same step may
        be tried again. LocalProtocolError is a bug of the caller: positions beyond `max_length`, or bytes that are no
        whole positions.
        """
        self._hops.check_open()
        row_bytes = self._hops.terms.model.row_bytes
        length, rest = divmod(len(hidden), row_bytes)
        if rest or not length or self.position + length > self.max_length:
            raise LocalProtocolError(
                f"{len(hidden)} bytes ({row_bytes} a position) at position {self.position} of {self.max_length}"
            )
        await self._hops.hold_from_relays([None, *self._hops.hops, None], length)
        waiting = deque(self._payloads(hidden))
        outputs: list[Buffer] = []
        stream, before = partial(self._stream, waiting, outputs), self._state.position
        work = partial(self._persist, stream, position_before=before, given=hidden)
        if self.receipts is None or self.receipts.pending < self._policy.trust.unverified_steps:
            await work()
        else:
            with single_error():
                async with trio.open_nursery() as beside:
                    beside.start_soon(self.verify)
                    await work()
        return outputs[0] if len(outputs) == 1 else bytearray().join(outputs)

    async def truncate(self, position: int) -> None:
        """Forget the positions from `position` on, at every hop. Raises as `step` does.

        LocalProtocolError is a bug of the caller: a `position` that the session does not hold.
        """
        await self._at_rest()
        self._state.truncate(position)
        if self.receipts is not None:
            self.receipts.truncate(position)
        await self._persist(trio.lowlevel.checkpoint, position_before=position)

    async def fork(self, targets: Sequence[InferenceSession]) -> None:
        """Make each of `targets`, other sessions of the same client, a copy of this one, whatever they were.

        It costs them a round trip, at whose end each goes its own way. Raises as `step` does, for any of them.
        """
        await self._at_rest()
        if (lost := self._state.lost) is not None and isinstance(lost.failure, LetGo):  # no server has it
            await self._persist(trio.lowlevel.checkpoint, position_before=self.position)
        self._hops.is_busy = True  # a copy that waits for KV has others free theirs
        try:
            with single_error():
                async with trio.open_nursery() as nursery:
                    for target in targets:
                        nursery.start_soon(target._become_copy, self)
        finally:
            self._hops.is_busy = False

    async def verify(self) -> None:
        """Check all signatures that have not been checked. A hop with a bad one is replaced with the next step.

        Steps check a few at a time, beside their work. Call this after the last step.
        """
        try:
            if self.receipts is not None:
                await self.receipts.verify_pending()
        except IntegrityError as error:
            log.warning("%s", error)
            for hop in self._hops.hops:
                if hop.hop.peer == error.peer:
                    hop.blame(error)

    async def export(self, path: Path, token_ids: Sequence[int] = ()) -> float:
        """Save the session in the file at `path`, for `llmnode.resume` in another process; it may go on here too.

        Returns for how many seconds the servers keep its KV after this process has gone or closed it. If it is 0, some
        do not, and the session is resumed by a replay of the file. The file has the state of the session, `token_ids`,
        which only the caller knows, and our key: a reader of the file can go on in our name. Raises ConfigError if the
        file cannot be written, and LocalProtocolError for a session that was opened without a swarm.
        """
        await self._at_rest()
        lease_s = await handover.export(self._hops, token_ids, path)
        self._is_exported = True
        return lease_s

    async def close(self) -> None:
        """Tell every hop to free its KV; or, if the session was exported, to keep it for as long as was promised."""
        self.rows.remove(self._hops)
        self._hops.ended = self._hops.ended or SessionClosed("closed")
        if self.spot_checks is not None:
            await self.spot_checks.close()
        await self._hops.say_goodbye(tuple(self._hops.hops), keep=self._is_exported)

    async def _at_rest(self) -> None:
        """Wait while another row moves this one along with itself. Raises SessionClosed."""
        while (move := self._hops.move) is not None:
            await move.wait()
        self._hops.check_open()

    @contextmanager
    def _ends_if_cancelled(self) -> Iterator[None]:
        """Some hops may have done their part and others not: a later step would take a late answer for its own."""
        self._hops.is_busy = True
        try:
            yield
        except SessionLost as error:
            self._hops.ended = error
            raise
        except LlmnodeError:
            raise
        except BaseException:  # a group, if it was cancelled while several hops were busy
            self._hops.ended = SessionClosed("it was cancelled on the way through its hops")
            raise
        finally:
            self._hops.is_busy = False

    # The way through the hops

    def _payloads(self, hidden: Buffer) -> Iterator[tuple[Buffer, int]]:
        """Payloads and their lengths. They go from hop to hop unchanged: a lossy codec loses once, not twice."""
        terms, most = self._hops.terms, self._policy.chunk_tokens
        form, row_bytes = terms.form, terms.model.row_bytes
        for at in range(0, len(hidden), most * row_bytes):
            rows = memoryview(hidden)[at : at + most * row_bytes]
            payload, length = bytes(form.encode(rows)), len(rows) // row_bytes  # copied: `hidden` is the caller's
            if not form.is_sound(payload, length):
                raise not_sent("hidden states")
            yield payload, length

    def _none_failed(self, given: Buffer) -> StepFailures:
        terms = self._hops.terms
        claims = OverflowClaims(Given(terms.adapter, terms.prompts, [given], terms.codec))
        return StepFailures(self._policy.recovery, claims)

    async def _persist(self, work: Callable[[], Awaitable[None]], *, position_before: int, given: Buffer = b"") -> None:
        """Do `work` with all hops at the session's position. After each failure replace lost hops and go on with it.

        `given` are the hidden states of a step.
        """
        if self._hops.move is not None:
            await self._at_rest()
        failures: StepFailures | None = None
        reached = self._state.position
        with self._ends_if_cancelled():
            while True:
                if self.spot_checks is not None:
                    self.spot_checks.raise_finding()
                try:
                    if (lost := self._state.lost) is not None:
                        raise lost.failure or LocalProtocolError("a lost hop has failed")
                    await self._hops.settle()
                    await self._hops.switch_to_direct()
                    await self._hops.leave_outdone()
                    if self._state.step >= self._moving.at_step and given:  # nobody waits for a move in a fork
                        await self._moving.look()
                    await work()
                    if failures is not None:
                        failures.got_through(self._finder)
                    return
                except PeerError as error:
                    self._state.unsettle()
                    if failures is not None and self._state.position > reached:  # the step gets on
                        failures.got_through(self._finder)
                        failures = None
                    if failures is None:
                        failures, reached = self._none_failed(given), self._state.position
                    try:
                        await self._recoverer.recover(error, failures)
                    except (NoRoute, NumericOverflow):
                        self._state.position = position_before
                        raise

    async def _stream(self, waiting: deque[tuple[Buffer, int]], outputs: list[Buffer]) -> None:
        """Run `waiting` through all hops, several chunks at a time. A chunk that is through goes over to `outputs`."""
        hops = self._hops.hops
        chunks = self._state.chunks([length for _, length in waiting])
        work = [(chunk, payload) for chunk, (payload, _) in zip(chunks, waiting, strict=True)]

        async def commit(result: ChunkResult) -> None:
            outputs.append(await self._commit(result))
            waiting.popleft()

        if len(work) == 1:  # a decode, for which a nursery would cost too much
            await commit(await run_chunk(hops, *work[0], self._policy))
        else:
            await run_chunks(hops, work, self._policy, commit)

    async def _commit(self, result: ChunkResult) -> Buffer:
        """All hops have computed the chunk: the session stands after it now. Returns its output, in fp32."""
        assert result.output.payload is not None, "the last hop keeps no outputs"
        terms = self._hops.terms
        output = decode_hidden(result.output.payload, terms.codec, result.chunk.length * terms.model.hidden_size)
        await self._hops.commit(result)
        self.timings = [each.timing for each in result.outputs]
        if self.spot_checks is not None:
            self.spot_checks.consider(result, self._hops.hops)
        return output

    async def _become_copy(self, source: InferenceSession) -> None:
        """Be a copy of `source`, at its peers. A hop that does not make the copy is replaced like a lost one."""
        await self._at_rest()
        with self._ends_if_cancelled():
            await self._hops.copy_from(source._hops)
        await self._persist(self._hops.tell_neighbours, position_before=self._state.position)


@asynccontextmanager
async def resume_session(
    saved: SavedSession,
    connections: Mapping[PeerId, PeerConnection],
    terms: SessionTerms,
    tools: SessionTools,
) -> AsyncIterator[InferenceSession]:
    """The session that was `saved`, at whichever of its hops there are `connections` to; closed with the context.

    `terms` are those of the saved session, and `tools` have a finder.

    Raises NoRoute if nobody holds the blocks of the others, SessionLost if that is of no use.
    """
    session = InferenceSession(terms, tools)
    async with _closed_at_last(session, terms.policy):
        await session.take_over(saved, connections)
        yield session


@asynccontextmanager
async def open_session(
    route: Route,
    connections: Mapping[PeerId, PeerConnection],
    terms: SessionTerms,
    tools: SessionTools | None = None,
    rows: Rows | None = None,
) -> AsyncIterator[InferenceSession]:
    """Open a session at every hop of `route`, as one of the `rows`; it is closed with the context.

    Raises the PeerError of the first hop that does not open.
    """
    session = InferenceSession(terms, tools or SessionTools(), rows)
    async with _closed_at_last(session, terms.policy):
        await session.open(route, connections)
        yield session


@asynccontextmanager
async def _closed_at_last(session: InferenceSession, policy: ClientPolicy) -> AsyncIterator[None]:
    try:
        yield
    finally:
        with trio.move_on_after(policy.open_timeout_s, shield=True):
            await session.close()
