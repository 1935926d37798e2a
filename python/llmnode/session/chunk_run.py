"""Runs chunks of hidden states through all hops of a session, or through those that replace a lost one."""

from __future__ import annotations

from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import trio

from llmnode.errors import PeerError, PeerTimeout, single_error
from llmnode.session.hop import SessionHop
from llmnode.wire.chunk_path import Outcome, Send, chunk_path
from llmnode.wire.frame import FrameType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.policy import ClientPolicy
    from llmnode.swarm.peer_connection import Expected
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
    not computed all of them by `until_s`.
    """
    window = trio.Semaphore(policy.chunks_ahead)
    committed = trio.Event()
    committed.set()

    async def run_and_commit(
        chunk: Chunk,
        origin: Buffer | SessionHop,
        before: trio.Event,
        done: trio.Event,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        result = await run_chunk(hops, chunk, origin, policy, task_status, until_s)
        await before.wait()
        await commit(result)
        done.set()
        window.release()

    with single_error():
        async with trio.open_nursery() as nursery:
            for chunk, origin in chunks:
                await window.acquire()
                before, committed = committed, trio.Event()
                await nursery.start(run_and_commit, chunk, origin, before, committed)


async def run_chunk(
    hops: Sequence[SessionHop],
    chunk: Chunk,
    origin: Buffer | SessionHop,
    policy: ClientPolicy,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    until_s: float = inf,
) -> ChunkResult:
    """Does what `chunk_path` says, and raises as it does.

    Started once the first hop has its input, or is to be given it. No answer of `hops` is waited for after `until_s`.
    """
    path = chunk_path(hops, chunk, origin, policy)
    at_once = min(chunk.length, policy.standing.short_step)  # beside decodes, a server computes more in parts
    with ExitStack() as stack:
        involved = [origin, *hops] if isinstance(origin, SessionHop) else hops
        expected = {hop.session: stack.enter_context(hop.expect(chunk)) for hop in involved}
        action, is_first = next(path), True
        while True:
            since_s = trio.current_time()
            is_limited = action.hop is not origin and not is_first
            outcome = await _do(action, at_once, expected, until_s if is_limited else inf)
            if not is_limited:  # the origin has deadlines of its own, and its waits are not the others' fault
                until_s += trio.current_time() - since_s
            if is_first and outcome.error is None:
                task_status.started()
            try:
                action, is_first = path.send(outcome), False
            except StopIteration as end:
                result: ChunkResult = end.value
                return result


async def _do(action: Action[SessionHop], at_once: int, expected: dict[SessionId, Expected], until_s: float) -> Outcome:
    since_s = trio.current_time()
    try:
        if isinstance(action, Send):
            await action.hop.connection.tell(action.frame)
            return Outcome(since_s)
        answer = expected[action.hop.session]
        if action.answer is not FrameType.RESULT:
            frame = await answer.receive(action.answer, min(action.timeout_s, max(0.0, until_s - since_s)))
        else:
            async with action.hop.one_by_one:  # or the first of several chunks would use up the time of all
                since_s, connection = trio.current_time(), action.hop.connection
                company = connection.company
                mark = company.come(at_once, since_s)
                limit_s = min(action.timeout_s, max(0.0, until_s - since_s))
                try:
                    frame = await answer.receive(FrameType.RESULT, min(action.early_s, limit_s))
                except PeerTimeout as early:
                    if limit_s <= action.early_s:
                        raise
                    frame = await _receive_unless_replaceable(action.hop, answer, since_s + limit_s, early)
                finally:
                    now_s = trio.current_time()
                    beside = company.go(at_once, mark, since_s, now_s)
                connection.computed_s = now_s
                return Outcome(now_s, since_s, frame, beside=beside)
        return Outcome(trio.current_time(), since_s, frame)
    except PeerError as error:
        return Outcome(trio.current_time(), error=error)


async def _receive_unless_replaceable(hop: SessionHop, answer: Expected, until_s: float, early: PeerTimeout) -> Frame:
    """The RESULT of a hop, for which it has had some time. Raises PeerTimeout at `until_s`, or the `early` one if
    others could take its place.
    """
    frame = None

    async def leave_if_replaceable(scope: trio.CancelScope) -> None:
        if await hop.is_replaceable():
            scope.cancel()

    with single_error():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_if_replaceable, nursery.cancel_scope)
            frame = await answer.receive(FrameType.RESULT, max(0.0, until_s - trio.current_time()))
            nursery.cancel_scope.cancel()
    if frame is None:
        raise early
    return frame
