"""A worker that many sessions share: right to the bit whatever comes together, fails or is cancelled."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.compute.work import failed
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Close, Fork, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError
from llmnode.testing import ExactWorker, exact_output, simulate, simulated
from llmnode.testing.simulate import seeds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.compute.work import Done, Work

SPAN = Span(0, 3)
ROW = 2
FORWARD_S = 0.05
LENGTH = 600


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def make_worker(policy: BatchPolicy | None = None) -> ExactWorker:
    return ExactWorker(SPAN, ROW, kv_tokens=100 * LENGTH, forward_s=FORWARD_S, policy=policy)


async def open_sessions(worker: ExactWorker, count: int) -> None:
    for session in range(count):
        assert await worker.do(Open(name(session), SPAN, LENGTH, PeerId(f"client {session}")))


def piece(session: int, start: int, length: int, value: int = 1) -> Forward:
    return Forward(name(session), start, length, bytes([value]) * (ROW * length))


async def together(*calls: Callable[[], Awaitable[object]]) -> None:
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)


@simulated
async def test_what_waits_while_a_forward_runs_is_computed_in_one() -> None:
    worker = make_worker()
    await open_sessions(worker, 5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.do, piece(0, 0, 1))
        await worker.executor.forward_began.wait()
        for session in range(1, 5):
            nursery.start_soon(worker.do, piece(session, 0, session))
    assert [sorted(batch) for batch in worker.executor.batches] == [[name(0)], [name(each) for each in range(1, 5)]]


@simulated
async def test_a_forward_that_fails_for_one_session_is_made_for_the_others() -> None:
    worker = make_worker()
    await open_sessions(worker, 4)
    failed, answers = [], {}

    async def ask(session: int) -> None:
        try:
            answers[session] = (await worker.do(piece(session, 0, 3))).hidden
        except RuntimeError:
            failed.append(session)

    worker.executor.fails = 1
    await together(*(partial(ask, session) for session in range(4)))
    assert len(failed) == 1
    assert set(answers.values()) == {exact_output(bytes([1] * 3 * ROW), SPAN)}
    assert len(answers) == 3
    assert (await worker.do(piece(failed[0], 0, 3))).hidden == answers.popitem()[1], "it is as it was before"


@simulated
async def test_a_long_piece_is_computed_in_parts_and_answered_as_one() -> None:
    worker = make_worker(BatchPolicy(unmeasured_prefill=100, most_prefill=100))
    await open_sessions(worker, 1)
    computed = await worker.do(piece(0, 0, 512))
    assert computed.hidden == exact_output(bytes([1] * 512 * ROW), SPAN)
    assert worker.executor.batches == [[name(0)]] * 6
    assert computed.compute_us == pytest.approx(6e6 * FORWARD_S, abs=2)
    assert computed.queue_us == pytest.approx(0, abs=2)


@simulated
async def test_a_decode_goes_between_the_parts_of_a_prefill() -> None:
    worker = make_worker(BatchPolicy(unmeasured_prefill=100, most_prefill=100))
    await open_sessions(worker, 2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.do, piece(0, 0, 512))
        await worker.executor.forward_began.wait()
        computed = await worker.do(piece(1, 0, 1))
    assert [name(1) in batch for batch in worker.executor.batches[:3]] == [False, True, False]
    assert computed.queue_us == pytest.approx(1e6 * FORWARD_S, abs=2)
    assert computed.compute_us == pytest.approx(1e6 * FORWARD_S, abs=2)


@simulated
async def test_a_piece_that_fails_half_way_leaves_its_session_as_it_was() -> None:
    worker = make_worker(BatchPolicy(unmeasured_prefill=100, most_prefill=100))
    await open_sessions(worker, 1)
    await worker.do(piece(0, 0, 20))
    worker.executor.forward_began = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_failure, worker, piece(0, 20, 300))
        await worker.executor.forward_began.wait()
        worker.executor.fails = 1
    again = await worker.do(piece(0, 20, 2))
    assert again.hidden == exact_output(bytes([1] * 22 * ROW), SPAN)[20 * ROW :]


class UnreachableWorker(ExactWorker):
    """While it `is_away`, its executor never sees a slice."""

    is_away = False

    async def _run_inline(self, work: Work) -> tuple[Done, float, float]:
        if self.is_away and work.slices:
            return failed(work, MemoryError("no memory to hand work over in")), 0.0, 0.0
        return await super()._run_inline(work)


@simulated
async def test_a_forward_whose_rest_never_reaches_the_executor_leaves_its_session_as_it_was() -> None:
    policy = BatchPolicy(unmeasured_prefill=100, most_prefill=100)
    worker = UnreachableWorker(SPAN, ROW, kv_tokens=LENGTH, forward_s=FORWARD_S, policy=policy)
    await open_sessions(worker, 1)
    await worker.do(piece(0, 0, 20))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_memory_error, worker, piece(0, 20, 300))
        await trio.sleep(0.5 * FORWARD_S)
        worker.is_away = True
        await trio.sleep(FORWARD_S)
        worker.is_away = False
    again = await worker.do(piece(0, 20, 2))
    assert again.hidden == exact_output(bytes([1] * 22 * ROW), SPAN)[20 * ROW :]


async def expect_memory_error(worker: ExactWorker, asked: Forward) -> None:
    with pytest.raises(MemoryError):
        await worker.do(asked)


async def expect_failure(worker: ExactWorker, asked: Forward) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        await worker.do(asked)


@pytest.mark.parametrize("after_s", [0.0, 0.4 * FORWARD_S, 1.5 * FORWARD_S], ids=["waiting", "running", "in parts"])
@simulated
async def test_a_piece_that_is_cancelled_leaves_its_session_and_others_as_they_were(after_s: float) -> None:
    worker = make_worker(BatchPolicy(unmeasured_prefill=100, most_prefill=100))
    await open_sessions(worker, 3)

    async def cancelled() -> None:
        with trio.move_on_after(after_s) as scope:
            await worker.do(piece(0, 0, 300))
        assert scope.cancelled_caught
        answer = await worker.do(piece(0, 0, 4))
        assert answer.hidden == exact_output(bytes([1] * 4 * ROW), SPAN)

    async def other(session: int) -> None:
        for position in range(10):
            answer = await worker.do(piece(session, position, 1))
            assert answer.hidden == exact_output(bytes([1] * (position + 1) * ROW), SPAN)[position * ROW :]

    await together(cancelled, partial(other, 1), partial(other, 2))


@simulated
async def test_of_a_piece_that_is_cancelled_no_part_begins_any_more() -> None:
    worker = make_worker(BatchPolicy(unmeasured_prefill=100, most_prefill=100, prefill_s=FORWARD_S))
    await open_sessions(worker, 1)
    with trio.move_on_after(1.5 * FORWARD_S) as scope:
        await worker.do(piece(0, 0, LENGTH))
    assert scope.cancelled_caught
    assert trio.current_time() < 4 * FORWARD_S, "the part that ran, and what undoes it"
    assert (await worker.do(piece(0, 0, 4))).hidden == exact_output(bytes([1] * 4 * ROW), SPAN)


@simulated
async def test_a_piece_that_runs_is_waited_for_and_one_that_waits_is_not() -> None:
    worker = make_worker()
    await open_sessions(worker, 2)
    worker.gate = trio.Event()
    running, waiting = trio.Event(), trio.Event()

    async def ask(session: int, ended: trio.Event) -> None:
        with suppress(trio.Cancelled):
            await worker.do(piece(session, 0, 1))
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 0, running)
        await worker.executor.forward_began.wait()
        nursery.start_soon(ask, 1, waiting)
        await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await waiting.wait()
            assert not running.is_set()
            worker.gate.set()
            await running.wait()
    assert worker.executor.batches == [[name(0)]]


@simulated
async def test_who_leads_and_is_cancelled_leaves_nobody_behind() -> None:
    """A decode that waits for others to come back may be cancelled just then."""
    worker = make_worker()
    await open_sessions(worker, 3)

    async def decode(session: int, positions: int) -> None:
        for position in range(positions):
            await worker.do(piece(session, position, 1))

    await together(partial(decode, 0, 6), partial(decode, 1, 6))
    for position in range(6, 10):
        await worker.do(piece(1, position, 1))
    batches = len(worker.executor.batches)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.do, piece(0, 6, 1))  # waits for session 1
        await trio.sleep(0.001)
        nursery.start_soon(worker.do, piece(2, 0, 1))
        await trio.sleep(0.001)
        assert len(worker.executor.batches) == batches, "it has waited"
        nursery.cancel_scope.cancel()
    await worker.do(piece(2, 0, 1))


@simulated
async def test_a_session_that_is_not_open_is_our_own_mistake() -> None:
    worker = make_worker()
    for call in (
        partial(worker.do, piece(0, 0, 1)),
        partial(worker.do, Truncate(name(0), 0)),
        partial(worker.do, Fork(name(0), name(0), 0, 0)),
    ):
        with pytest.raises(LocalProtocolError, match="not open"):
            await call()
    await worker.do(Close(name(0)))
    await open_sessions(worker, 1)
    with pytest.raises(LocalProtocolError, match="open already"):
        await worker.do(Open(name(0), SPAN, 1, PeerId("client")))


@simulated
async def test_a_session_that_does_not_fit_is_not_open() -> None:
    worker = make_worker()
    assert not await worker.do(Open(name(0), SPAN, 1000 * LENGTH, PeerId("client")))
    assert await worker.do(Open(name(0), SPAN, LENGTH, PeerId("client"), Priority.BATCH))
    await worker.do(Close(name(0)))
    assert worker.kv_tokens_free == 100 * LENGTH


def any_policy(rng: random.Random) -> BatchPolicy:
    """Where there is little time, prefills go through a few blocks at once."""
    added_s = rng.choice([0.001, 0.1, 1.0])
    sizes = {"fast_prefill": rng.choice([2, 16, 128]), "most_prefill": rng.choice([16, 64, 512])}
    return BatchPolicy(stretch=1 + added_s, prefill_s=added_s, **sizes)


@pytest.mark.parametrize("seed", seeds(60))
def test_any_company_gives_the_same_bytes(seed: int) -> None:
    simulate(partial(share_a_worker, random.Random(seed)), seed=seed)


async def share_a_worker(rng: random.Random) -> None:
    """Sessions of several clients that step, take back, copy each other, fail, are cancelled and go, at any time."""
    worker = make_worker(any_policy(rng))
    spans = {number: rng.choice([SPAN, SPAN, Span(1, 3), Span(2, 3)]) for number in range(8)}
    worker.forward_s = rng.choice([0.0, FORWARD_S])
    texts: dict[int, bytes] = {}
    copying: set[int] = set()  # of which it is not known yet what they have

    async def live(number: int) -> None:
        await trio.sleep(rng.choice([0.0, rng.uniform(0, 10 * FORWARD_S)]))
        priority = rng.choice(list(Priority))
        assert await worker.do(Open(name(number), spans[number], LENGTH, PeerId(f"client {number % 3}"), priority))
        texts[number] = b""
        for _ in range(rng.randint(1, 12)):
            await rng.choice([step, step, step, step, take_back, copy, give_up, fail])(number)
            await trio.sleep(rng.choice([0.0, 0.0, 0.001, rng.uniform(0, 0.2)]))
        del texts[number]
        await worker.do(Close(name(number)))

    def piece_of(number: int) -> Forward:
        start = len(texts[number]) // ROW
        length = min(rng.choice([1, 1, 1, 5, 40, 300]), LENGTH - start)
        return Forward(name(number), start, length, rng.randbytes(ROW * length))

    async def step(number: int) -> None:
        if (asked := piece_of(number)).length:
            try:
                computed = await worker.do(asked)
            except RuntimeError:  # another's `fail`
                return
            texts[number] += bytes(asked.hidden)
            assert computed.hidden == exact_output(texts[number], spans[number])[asked.start * ROW :]

    async def take_back(number: int) -> None:
        keep = rng.randint(0, len(texts[number]) // ROW)
        texts[number] = texts[number][: keep * ROW]  # before: a copy that is asked for now comes after
        await worker.do(Truncate(name(number), keep))

    async def copy(number: int) -> None:
        alike = {each for each in texts if spans[each] == spans[number]}
        source = rng.choice(sorted(alike - copying))
        text = texts[source]
        if source != number:
            copying.add(number)
            with suppress(RuntimeError):
                await worker.do(Fork(name(number), name(source), 0, len(text) // ROW))
                texts[number] = text
            copying.remove(number)

    async def give_up(number: int) -> None:
        if (asked := piece_of(number)).length:
            with trio.move_on_after(rng.choice([0.0, 0.01, 0.1])), suppress(RuntimeError):
                await worker.do(asked)
                texts[number] += bytes(asked.hidden)

    async def fail(number: int) -> None:
        worker.executor.fails += 1
        await step(number)

    await together(*(partial(live, number) for number in range(8)))
    assert worker.executor.reserved == 0
