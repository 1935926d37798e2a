"""A client's session in plain Python, for pair tests: it does with a `SessionState` what `llmnode.session` does.

All its results are compared with the same computation in one go.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from llmnode.core.ids import Step
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import IntegrityError, PeerError, PeerRefused
from llmnode.testing import exact_output
from llmnode.wire.chunk import Chunk
from llmnode.wire.chunk_path import ALL_WOULD_REFUSE, Outcome, Send, chunk_path
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.session_state import SessionState
from unit.paired_client import CLIENT, PairedHop, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from llmnode.core.ids import Epoch, SessionId
    from llmnode.wire.chunk import HopTiming
    from llmnode.wire.chunk_path import ChunkResult
    from llmnode.wire.frame import Buffer, Frame
    from llmnode.wire.hop_state import Request
    from unit.paired_client import Task, World

MOST_TRIES = 100
"""Faults are few: a session that needs more tries than this makes no progress."""
LAST_STEP = 2**32 - 1


@dataclass(frozen=True)
class SavedState:
    """A session as another process is to take it over, with the names of those that hops have kept."""

    given: bytes
    epoch: Epoch
    position: int
    pieces: Sequence[tuple[Buffer, int]]
    kept: Sequence[tuple[Hop, SessionId | None]]


class PairedSession:
    """`given` are the inputs of all its positions."""

    def __init__(self, world: World) -> None:
        self.state: SessionState[PairedHop] = SessionState(world.terms)
        self.given = b""
        self.is_kept = False
        self.timings: Sequence[HopTiming] = ()
        self._world = world
        self._row_bytes = world.terms.model.row_bytes
        self._looks = 0

    @property
    def hops(self) -> Sequence[PairedHop]:
        return self.state.hops

    # Operations

    def open(self) -> None:
        for _ in range(MOST_TRIES):
            with suppress(PeerError):
                self.state.hops = self._open(self._route(Span(0, self._world.terms.model.blocks)), [None])
                return
        raise AssertionError("it does not open")

    def step(self, rows: bytes) -> None:
        """Append positions in chunks."""
        most = self._world.terms.policy.chunk_tokens * self._row_bytes
        waiting = [rows[at : at + most] for at in range(0, len(rows), most)]
        self._persist(partial(self._stream, waiting))

    def truncate(self, position: int) -> None:
        self.state.truncate(position)
        self.given = self.given[: position * self._row_bytes]
        self._persist(lambda: None)

    def become_copy(self, source: PairedSession) -> None:
        hops = [self._reuse_or_new(hop) for hop in source.hops]
        shared = self.state.shared_with(source.state, hops)
        if not self.state.is_copy(source.state, hops, shared):
            self._abandon([hop for hop in self.hops if hop not in hops])
            requests = self.state.copy(source.state, hops, shared)
            self._world.run(self._copy(hop, opened, request) for hop, opened, request in requests)
        self.given = source.given[: source.state.position * self._row_bytes]
        self._persist(self._tell_neighbours)

    def save(self) -> SavedState:
        state, world = self.state, self._world
        if state.is_settled and world.terms.policy.recovery.upstream_logs:
            world.run(self._get_lease(hop) for hop in self.hops if hop.failure is None)
        kept = [(hop.hop, hop.session if hop.is_leased else None) for hop in self.hops]
        self.is_kept = True
        pieces = list(self.hops[0].inputs.pieces(state.position))
        return SavedState(self.given, state.epoch, state.position, pieces, kept)

    def take_over(self, saved: SavedState) -> None:
        """Instead of `open`: go on where it was saved."""
        state = self.state
        self.given = saved.given
        asked_in = state.resume(saved.epoch, saved.position)
        state.hops = [PairedHop(self._world, hop, name) for hop, name in saved.kept]
        for hop, (_, name) in zip(state.hops, saved.kept, strict=True):
            if name is None:
                hop.blame(PeerRefused(RefusalCode.UNKNOWN_SESSION, "has not kept the session"))
        there = [hop for hop in state.hops if hop.failure is None]
        self._world.run(self._resume(hop, asked_in, saved.epoch, saved.position) for hop in there)
        state.hops = self._join_gaps(state.hops)
        for payload, length in saved.pieces:
            state.hops[0].inputs.append(payload, length)
        self._persist(lambda: None)

    def move(self) -> None:
        """Have every hop answer over another connection, which is the same here."""
        self._persist(lambda: self._world.run(self._move(hop) for hop in self.hops))

    def look_into_logs(self, start: int, length: int) -> None:
        """Ask every hop that logs for results of before. An error is no failure of the session."""
        for hop in self.hops:
            if hop.keeps_outputs and hop.failure is None and self.state.is_settled:
                with suppress(PeerError):
                    self._world.run([self._look(hop, start, length)])

    def close(self) -> None:
        for hop in self.hops:
            self._say_goodbye(hop, keep=self.is_kept)

    def check_pushes(self) -> None:
        """In the last chunk each hop pushed its output to the next one, if it could."""
        pairs = zip(self.hops, self.hops[1:], self.timings[1:], strict=False)
        for before, hop, timing in pairs:
            can_push = self._world.terms.policy.push.enabled and before.pushing.is_trusted
            assert timing.direct == (can_push and before.hop.peer != hop.hop.peer)

    def check(self, *, is_quiet: bool = False) -> None:
        """Both halves stand at the same position of the same epoch, and have the same logged.

        If it `is_quiet`, nothing is under way: then no server waits for a step.
        """
        state = self.state
        assert state.position * self._row_bytes == len(self.given)
        if not state.is_settled or any(hop.wire != self._world.wire(CLIENT, hop.hop.peer) for hop in self.hops):
            return
        logs = self._world.terms.policy.recovery.upstream_logs
        for number, hop in enumerate(self.hops):
            session = self._world.peers[hop.hop.peer].sessions[hop.session]
            assert (session.stage.epoch, session.stage.position) == (state.epoch, state.position)
            if is_quiet and not session.was_given_wrong:
                assert not session.stage._held, "it shows nowhere else"
            assert session.outputs is None or session.outputs.positions == state.position
            assert (session.outputs is not None) == (logs and hop is not self.hops[-1])
            assert hop.inputs.positions == (0 if logs and number else state.position)

    # Chunks

    def _persist(self, work: Callable[[], None]) -> None:
        for _ in range(MOST_TRIES):
            try:
                if self.state.lost is not None:
                    raise self.state.lost.failure or AssertionError("a lost hop has failed")
                self._settle()
                if any(hop.pushing.has_failed for hop in self.hops):
                    self._tell_neighbours()
                work()
                return
            except PeerError as error:
                self.state.unsettle()
                self._recover(error)
        raise AssertionError("no progress")

    def _stream(self, waiting: list[bytes]) -> None:
        lengths = [len(rows) // self._row_bytes for rows in waiting]
        chunks = zip(self.state.chunks(lengths), list(waiting), strict=True)

        def commit(result: ChunkResult) -> None:
            self.given += waiting.pop(0)
            self._check_output(result)
            self.timings = [each.timing for each in result.outputs]
            self.state.commit(result)

        self._run_chunks(self.hops, chunks, commit)

    def _run_chunks(
        self,
        hops: Sequence[PairedHop],
        chunks: Iterable[tuple[Chunk, Buffer | PairedHop]],
        commit: Callable[[ChunkResult], None],
    ) -> None:
        tasks = [self._pass(hops, chunk, origin) for chunk, origin in chunks]
        self._world.run(tasks, commit, self._world.terms.policy.chunks_ahead)

    def _check_output(self, result: ChunkResult) -> None:
        assert result.output.payload is not None
        expected = exact_output(self.given, Span(0, self._world.terms.model.blocks))
        assert bytes(result.output.payload) == expected[result.chunk.start * self._row_bytes :]

    def _settle(self) -> None:
        if not self.state.is_settled:
            self._carry_out(self.state.settle(self._world.now_s))
            self._tell_neighbours()
            self.state.settled()

    def _tell_neighbours(self) -> None:
        self._carry_out(self.state.tell_neighbours(self._world.now_s))

    # Recovery

    def _recover(self, error: PeerError) -> None:
        if self.state.lost is None:
            assert isinstance(error, IntegrityError), "every other error is the failure of a hop"
            met = self._world.met
            assert met["push changed"] or met["push ahead"], "honest hops do not contradict each other"
        while (lost := self.state.lost) is not None:
            assert lost.failure is not None
            _check_others_may_help(lost.failure)
            self._replace(lost)

    def _replace(self, lost: PairedHop) -> None:
        before = self.state.before(lost)
        lost.inputs.truncate(self.state.position)
        self._abandon([lost])
        for _ in range(MOST_TRIES):
            try:
                self._rebuild(lost, before)
                return
            except PeerError as error:
                if before is not None and before.failure is not None:
                    return
                _check_others_may_help(error)
        raise AssertionError("nobody takes its place")

    def _rebuild(self, lost: PairedHop, before: PairedHop | None) -> None:
        state = self.state
        state.begin_epoch()
        logs = self._world.terms.policy.recovery.upstream_logs
        told = [None, *state.until(lost)][-2:] if logs else []
        hops = self._open(self._route(lost.hop.span), told, quiet=True)
        try:
            self._run_chunks(hops, state.replays(lost), lambda result: state.log_inputs(result, hops, before))
        except PeerError:
            self._abandon(hops)
            raise
        state.replace([lost], hops)

    def _join_gaps(self, hops: Sequence[PairedHop]) -> list[PairedHop]:
        """With one lost hop for all that follow each other, as only the inputs of the first are known."""
        joined: list[PairedHop] = []
        for hop in hops:
            if hop.failure is not None and joined and (before := joined[-1]).failure is not None:
                span = Span(before.hop.span.start, hop.hop.span.end)
                joined[-1] = PairedHop(self._world, Hop(before.hop.peer, span))
                joined[-1].failure = before.failure
            else:
                joined.append(hop)
        return joined

    # Hops

    def _route(self, span: Span) -> list[Hop]:
        """Through all blocks of `span`, which are cut anywhere, at any peers."""
        choose, names = self._world.choose, list(self._world.peers)
        cuts = [block for block in range(span.start + 1, span.end) if choose(2)]
        edges = [span.start, *cuts, span.end]
        first = choose(len(names))
        return [
            Hop(names[(first + number) % len(names)], Span(start, end))
            for number, (start, end) in enumerate(pairwise(edges))
        ]

    def _open(
        self, route: Sequence[Hop], before: Sequence[PairedHop | None], *, quiet: bool = False
    ) -> list[PairedHop]:
        hops = [PairedHop(self._world, hop) for hop in route]
        try:
            self._carry_out(self.state.open(hops, before, self._world.now_s, quiet=quiet))
        except PeerError:
            self._abandon(hops)
            raise
        return hops

    def _reuse_or_new(self, source: PairedHop) -> PairedHop:
        wire = self._world.wire(CLIENT, source.hop.peer)
        well = (hop for hop in self.hops if (hop.hop, hop.wire) == (source.hop, wire) and hop.failure is None)
        return next(well, None) or PairedHop(self._world, source.hop)

    def _abandon(self, hops: Iterable[PairedHop]) -> None:
        for hop in hops:
            self._say_goodbye(hop, keep=False)

    def _say_goodbye(self, hop: PairedHop, *, keep: bool) -> None:
        with suppress(PeerError):
            self._tell(hop, hop.goodbye(keep=keep))

    def _carry_out(self, requests: Iterable[tuple[PairedHop, Sequence[Request]]]) -> None:
        self._world.run(self._ask(hop, each) for hop, each in requests)

    # Tasks

    def _ask(self, hop: PairedHop, requests: Sequence[Request]) -> Task:
        with hop.blamed(), self._world.expecting(_question(request.frame) for request in requests):
            for request in requests:
                self._tell(hop, request.frame)
            for request in requests:
                outcome = yield self._wanted(hop, request.frame, request.answer, request.timeout_s)
                try:
                    hop.answered(request, outcome.frame())
                except PeerRefused as refusal:
                    hop.refused(request, refusal, self._world.now_s)

    def _ask_alone(self, hop: PairedHop, request: Request) -> Generator[Wanted, Outcome, Frame]:
        with self._world.expecting([_question(request.frame)]):
            self._tell(hop, request.frame)
            return (yield self._wanted(hop, request.frame, request.answer, request.timeout_s)).frame()

    def _pass(self, hops: Sequence[PairedHop], chunk: Chunk, origin: Buffer | PairedHop) -> Task:
        path = chunk_path(hops, chunk, origin, self._world.terms.policy)
        involved = [origin, *hops] if isinstance(origin, PairedHop) else hops
        about = chunk.epoch, chunk.step
        with self._world.expecting((hop.session, *about) for hop in involved):
            action = next(path)
            while True:
                if isinstance(action, Send):
                    outcome = self._sent(action.hop, action.frame)
                else:
                    outcome = yield self._wanted(action.hop, about, action.answer, action.timeout_s)
                try:
                    action = path.send(outcome)
                except StopIteration as end:
                    return end.value

    def _copy(self, hop: PairedHop, opened: Epoch, request: Request) -> Task:
        with suppress(PeerError):
            if not hop.is_open:
                yield from self._ask(hop, [hop.open(opened)])
            yield from self._ask(hop, [request])

    def _get_lease(self, hop: PairedHop) -> Task:
        request = hop.lease(self.state.epoch, self.state.step)
        with suppress(PeerError):
            hop.answered(request, (yield from self._ask_alone(hop, request)))

    def _resume(self, hop: PairedHop, asked_in: Epoch, epoch: Epoch, position: int) -> Task:
        try:
            with hop.blamed():
                hop.taken_over((yield from self._ask_alone(hop, hop.resume(asked_in))), epoch, position)
        except PeerError:
            self._say_goodbye(hop, keep=False)

    def _move(self, hop: PairedHop) -> Task:
        with hop.blamed():
            answer = yield from self._ask_alone(hop, hop.resume(self.state.epoch, self.state.step))
            hop.moved(answer, self.state.epoch, self.state.position)
        if hop.is_leased:
            yield from self._get_lease(hop)

    def _look(self, hop: PairedHop, start: int, length: int) -> Task:
        chunk = Chunk(self.state.epoch, Step(LAST_STEP - self._looks), start, length)
        self._looks += 1
        answer = yield from self._ask_alone(hop, hop.replay(chunk, push=False))
        payload = hop.replayed(chunk, answer, push=False).payload
        assert payload is not None
        whole = exact_output(self.given, Span(0, hop.hop.span.end))
        assert bytes(payload) == whole[start * self._row_bytes : (start + length) * self._row_bytes]

    def _tell(self, hop: PairedHop, frame: Frame) -> None:
        self._world.tell(hop.hop.peer, hop.wire, frame)

    def _sent(self, hop: PairedHop, frame: Frame) -> Outcome:
        try:
            self._tell(hop, frame)
        except PeerError as error:
            return Outcome(self._world.now_s, error=error)
        return Outcome(self._world.now_s)

    def _wanted(self, hop: PairedHop, about: Frame | tuple[Epoch, Step], kind: FrameType, timeout_s: float) -> Wanted:
        epoch, step = about if isinstance(about, tuple) else (about.epoch, about.step)
        return Wanted(hop.hop.peer, hop.wire, (hop.session, epoch, step), kind, self._world.now_s, timeout_s)


def _question(frame: Frame) -> tuple[SessionId, Epoch, Step]:
    return frame.session, frame.epoch, frame.step


def _check_others_may_help(error: PeerError) -> None:
    """Otherwise a client gives the session up. No hop computes or shows other things than it should."""
    assert error.peer is None or not isinstance(error, IntegrityError), f"it is honest: {error}"
    is_own_fault = isinstance(error, PeerRefused) and error.code in ALL_WOULD_REFUSE
    assert not is_own_fault, f"no other peer would do it either: {error}"
