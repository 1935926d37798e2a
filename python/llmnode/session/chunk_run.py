"""Runs chunks of hidden states through all hops of a session, or through those that replace a lost one."""

from __future__ import annotations

from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import trio

from llmnode.core.shared_deadline import SharedDeadline, Stretch
from llmnode.errors import PeerError, PeerTimeout, single_error
from llmnode.session.hop import SessionHop
from llmnode.wire.chunk_path import Outcome, Receive, Send, chunk_path
from llmnode.wire.frame import FrameType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.policy import ClientPolicy
    from llmnode.swarm.expected import Expected
    from llmnode.wire.chunk import Chunk
    from llmnode.wire.chunk_path import Action, ChunkResult
    from llmnode.wire.frame import Buffer, Frame

    Commit: TypeAlias = Callable[[ChunkResult], Awaitable[None]]


async def run_chunks(
    hops: Sequence[SessionHop],
    chunks: Iterable[tuple[Chunk, Buffer | SessionHop]],
    policy: ClientPolicy,
    commit: Commit,
    until_s: float = inf,
) -> None:
    """Runs chunks that follow each other, several under way at once. `commit` is called for each, in their order.

    With each comes its payload, or the hop that has logged it. Raises as `chunk_path` does; PeerTimeout if `hops` have
    not computed all of them by `until_s`, which is the failure of the hop that took most of the time.
    """
    window = trio.Semaphore(policy.chunks_ahead)
    limit = Limit(until_s)
    committed, in_turn = trio.Event(), trio.Event()
    committed.set()
    in_turn.set()

    async def run_and_commit(
        chunk: Chunk,
        origin: Buffer | SessionHop,
        before: trio.Event,
        done: trio.Event,
        turn: tuple[trio.Event, trio.Event],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        result = await run_chunk(hops, chunk, origin, policy, task_status, limit, turn)
        await before.wait()
        await commit(result)
        done.set()
        window.release()

    with single_error():
        async with trio.open_nursery() as nursery:
            for chunk, origin in chunks:
                await window.acquire()
                before, committed = committed, trio.Event()
                earlier, in_turn = in_turn, trio.Event()
                await nursery.start(run_and_commit, chunk, origin, before, committed, (earlier, in_turn))


class Limit(SharedDeadline):
    """The time that several hops have together for chunks, and how long the client has waited for each of them."""

    def __init__(self, until_s: float = inf) -> None:
        super().__init__(until_s)
        self._waited_s: dict[SessionId, float] = {}

    def note(self, hop: SessionHop, since_s: float, now_s: float) -> None:
        """The client has waited for an answer of `hop`."""
        self._waited_s[hop.session] = self._waited_s.get(hop.session, 0.0) + now_s - since_s

    def check(self, hops: Sequence[SessionHop], last: SessionHop) -> None:
        """The time is over, and `last` has not answered. Raises PeerTimeout if another of `hops` took more of it."""
        slowest = max(hops, key=lambda hop: (self._waited_s.get(hop.session, 0.0), hop is last))
        if slowest is not last:
            took_s = self._waited_s[slowest.session]
            late = PeerTimeout(f"took {took_s:.3g} s of the time that all new hops had together")
            raise slowest.blame(late.after(took_s))


class _Waits:
    """The waits on the way of one chunk, one after the other. The `limit` is that of all chunks."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._hop: SessionHop | None = None
        """The one that is waited for, if the time is its own."""
        self._wait: Stretch = -inf, inf
        self._until_s = inf
        self._pushed: list[Stretch] = []
        """The waits in which a push did not come, or the hop was slow."""

    def begin(self, hop: SessionHop | None, since_s: float) -> float:
        """Returns until when it may last. No `hop` stands for one that has deadlines of its own."""
        self._hop, self._wait, self._until_s = hop, (since_s, inf), inf
        if hop is not None:
            self._limit.begin(since_s)
            self._until_s = self._limit.until_with_s(self._pushed)
        return self._until_s

    def end(self, now_s: float) -> None:
        since_s, _ = self._wait
        self._wait = since_s, now_s
        if self._hop is not None:
            self._limit.end(since_s, now_s)

    def check(self, hops: Sequence[SessionHop]) -> None:
        """The answer did not come. Raises PeerTimeout if the time was over, and another hop took more of it."""
        if self._hop is not None:
            self._limit.note(self._hop, *self._wait)
            if self._wait[1] >= self._until_s:
                self._limit.check(hops, self._hop)

    def judge(self, outcome: Outcome, *, was_pushed: bool) -> None:
        """The chunk goes on. The hop was to have a push if `was_pushed`."""
        if self._hop is None:
            self._limit.excuse_idle(*self._wait)
            return
        if was_pushed and outcome.error is not None:
            self._pushed.append(self._wait)
            return
        self._limit.note(self._hop, *self._wait)
        took_s, pushed_s = (sum(end_s - since_s for since_s, end_s in each) for each in ([self._wait], self._pushed))
        if outcome.answer is not None and took_s < pushed_s:  # it was the push
            self._limit.excuse(self._pushed)
            self._pushed.clear()


async def run_chunk(
    hops: Sequence[SessionHop],
    chunk: Chunk,
    origin: Buffer | SessionHop,
    policy: ClientPolicy,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    limit: Limit | None = None,
    turn: tuple[trio.Event, trio.Event] | None = None,
) -> ChunkResult:
    """Does what `chunk_path` says, and raises as it does.

    Started once the first hop has its input, or is to be given it. No answer of `hops` is waited for after the `limit`.
    A hop computes chunks in their order, so its answer is waited for once it has answered those before. `turn` has the
    events that the chunk before waits for the first hop, and that this one does.
    """
    path = chunk_path(hops, chunk, origin, policy)
    at_once = min(chunk.length, policy.standing.short_step)  # beside decodes, a server computes more in parts
    with ExitStack() as stack:
        involved = [origin, *hops] if isinstance(origin, SessionHop) else hops
        expected = {hop.session: stack.enter_context(hop.expect(chunk)) for hop in involved}
        action, is_first, waits = next(path), True, None if limit is None else _Waits(limit)
        asked: SessionHop | None = None
        try:
            while True:
                if action.hop is not asked and isinstance(action, Receive) and action.answer is FrameType.RESULT:
                    if asked is not None:
                        asked.one_by_one.release()
                        asked = None
                    elif turn is not None:  # the hop before may answer in another order
                        await turn[0].wait()
                    await action.hop.one_by_one.acquire()
                    asked = action.hop
                    if turn is not None:
                        turn[1].set()
                since_s, was_pushed = trio.current_time(), isinstance(action, Receive) and action.is_pushed
                hop = None if is_first or action.hop is origin else action.hop  # the origin has deadlines of its own
                until_s = inf if waits is None else waits.begin(hop, since_s)
                outcome = await _do(action, at_once, expected, until_s)
                if waits is not None:
                    waits.end(trio.current_time())
                if is_first and outcome.error is None:
                    task_status.started()
                try:
                    action, is_first = path.send(outcome), False
                except StopIteration as end:
                    result: ChunkResult = end.value
                    return result
                except PeerTimeout:
                    if waits is not None:
                        waits.check(hops)
                    raise
                if waits is not None:
                    waits.judge(outcome, was_pushed=was_pushed)
        finally:
            if asked is not None:
                asked.one_by_one.release()


async def _do(action: Action[SessionHop], at_once: int, expected: dict[SessionId, Expected], until_s: float) -> Outcome:
    since_s = trio.current_time()
    try:
        if isinstance(action, Send):
            await action.hop.connection.tell(action.frame)
            return Outcome(since_s)
        answer, most_s = expected[action.hop.session], min(action.timeout_s, max(0.0, until_s - since_s))
        if action.answer is not FrameType.RESULT:
            frame = await answer.receive(action.answer, most_s)
            return Outcome(trio.current_time(), since_s, frame)
        connection = action.hop.connection
        mark = connection.company.come(at_once, since_s)
        try:
            frame = await answer.receive(FrameType.RESULT, min(action.early_s, most_s))
        except PeerTimeout as early:
            if most_s <= action.early_s:
                raise
            frame = await _receive_unless_replaceable(action.hop, answer, since_s, since_s + most_s, early)
        finally:
            now_s = trio.current_time()
            beside = connection.company.go(at_once, mark, since_s, now_s)
        connection.computed_s = now_s
        return Outcome(now_s, since_s, frame, beside=beside)
    except PeerError as error:
        now_s = trio.current_time()
        return Outcome(now_s, error=error.after(now_s - since_s))


async def _receive_unless_replaceable(
    hop: SessionHop, answer: Expected, since_s: float, until_s: float, early: PeerTimeout
) -> Frame:
    """The RESULT of a hop, for which it has had the time since `since_s`. Raises PeerTimeout at `until_s`, or the
    `early` one if others have computed since then and could take its place.
    """
    frame = None

    async def leave_if_replaceable(scope: trio.CancelScope) -> None:
        if await hop.is_replaceable(since_s):
            scope.cancel()

    with single_error():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_if_replaceable, nursery.cancel_scope)
            frame = await answer.receive(FrameType.RESULT, max(0.0, until_s - trio.current_time()))
            nursery.cancel_scope.cancel()
    if frame is None:
        raise early
    return frame
