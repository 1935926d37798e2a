"""A worker in a process of its own: its results are right to the bit, and the node survives and tells its end."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import trio
import trio.testing

from llmnode.compute import shared
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Close, Fork, Forward, Open, Truncate
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError, WorkerLost
from llmnode.testing import exact_output
from unit.exact_child import DIE, EXACT_ROW, FAIL, HANG, SEIZE, STUMBLE, TOKENS_BESIDE_PID
from unit.started_worker import DEADLINE_S, LENGTH, SPAN, Told, open_loader, open_worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.compute.batching import BatchingWorker


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def piece(session: int, start: int, length: int, value: int = 1) -> Forward:
    return Forward(name(session), start, length, bytes([value]) * (EXACT_ROW * length))


async def open_sessions(worker: BatchingWorker, *sessions: int) -> None:
    for session in sessions:
        assert await worker.do(Open(name(session), SPAN, LENGTH, PeerId(f"client {session}")))


OTHER_SPAN = Span(3, 5)


async def together(*calls: Callable[[], Awaitable[object]]) -> None:
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)


@pytest.mark.parametrize("chosen", [None, "ACTIVE"])
def test_idle_threads_of_a_worker_sleep_unless_the_user_says_otherwise(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)

    async def main() -> None:
        async with open_worker() as (loader, _):
            assert psutil.Process(loader.pid).environ()["OMP_WAIT_POLICY"] == (chosen or "PASSIVE")

    trio.run(main)


def test_all_that_a_worker_does_comes_out_as_in_this_process() -> None:
    async def main() -> None:
        async with open_worker() as (_, worker):
            await open_sessions(worker, 0, 1)
            assert worker.kv_tokens_free == 8 * LENGTH
            assert not await worker.do(Open(name(2), SPAN, 9 * LENGTH, PeerId("client 2"))), "it does not fit"
            whole = exact_output(bytes([1] * 3 + [2]) * EXACT_ROW, SPAN)
            for start, length in ((0, 3), (3, 1)):
                await worker.do(piece(0, start, length))
            await worker.do(Truncate(name(0), 3))
            assert await worker.do(Forward(name(0), 3, 1, bytes([2] * EXACT_ROW))) != whole
            await worker.do(Fork(name(1), name(0), 0, 3))
            computed = await worker.do(piece(1, 3, 2, 7))
            expected = exact_output(bytes([1] * 3 * EXACT_ROW + [7] * 2 * EXACT_ROW), SPAN)
            assert computed.hidden == expected[3 * EXACT_ROW :]
            assert computed.compute_us > 0
            assert computed.queue_us > 0, "the crossing is in it"
            await worker.do(Close(name(0)))
            await worker.do(Close(name(1)))
            assert worker.kv_tokens_free == 10 * LENGTH

    trio.run(main)


def test_what_fails_for_one_fails_for_no_other_of_its_batch() -> None:
    async def main() -> None:
        async with open_worker() as (_, worker):
            await open_sessions(worker, *range(6))
            answers: dict[int, object] = {}

            async def ask(session: int, value: int) -> None:
                try:
                    answers[session] = (await worker.do(piece(session, 0, 2, value))).hidden
                except RuntimeError as error:
                    answers[session] = str(error)

            await together(*(partial(ask, each, value) for each, value in enumerate((1, FAIL, 1, STUMBLE, 1, 1))))
            assert answers.pop(1) == "out of memory, as told"
            assert answers.pop(3) == "KeyError: 'as told'"
            assert set(answers.values()) == {exact_output(bytes([1] * 2 * EXACT_ROW), SPAN)}
            await worker.do(piece(1, 0, 2))

    trio.run(main)


def test_shared_memory_grows_to_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)

    async def main() -> None:
        async with open_worker() as (_, worker):
            await open_sessions(worker, 0, 1)
            for length in (1, 3, 500, 2000, 2):
                computed = await worker.do(piece(0, 0, length, 3))
                assert computed.hidden == exact_output(bytes([3] * length * EXACT_ROW), SPAN)
                await worker.do(Truncate(name(0), 0))

    trio.run(main)


def test_where_there_is_no_memory_to_hand_work_over_in_that_fails_and_what_comes_after_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(_memory: shared.SharedMemory, _size: int) -> None:
        raise OSError(errno.ENOSPC, "as told")

    async def main() -> None:
        async with open_worker() as (_, worker):
            await open_sessions(worker, 0)
            with monkeypatch.context() as patched:
                patched.setattr(shared.SharedMemory, "grow", no_memory)
                with pytest.raises(MemoryError, match="as told"):
                    await worker.do(piece(0, 0, 1, 9))
            assert (await worker.do(piece(0, 0, 1, 9))).hidden == exact_output(bytes([9] * EXACT_ROW), SPAN)

    trio.run(main)


def test_an_error_that_nobody_foresaw_while_work_is_handed_over_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stumble(_memory: shared.SharedMemory, _size: int) -> None:
        raise KeyError("as told")

    async def main() -> None:
        async with open_loader() as loader:
            await loader.open_model()
            first, second = await loader.load(SPAN), await loader.load_beside(SPAN)
            assert second is not None
            await open_sessions(first, 0)
            await open_sessions(second, 1)
            with monkeypatch.context() as patched:
                patched.setattr(shared.SharedMemory, "grow", stumble)
                with pytest.raises(KeyError, match="as told"):
                    await first.do(piece(0, 0, 1, 9))
            assert (await second.do(piece(1, 0, 1, 9))).hidden == exact_output(bytes([9] * EXACT_ROW), SPAN)

    trio.run(main)


def test_a_forward_that_is_cancelled_while_it_runs_leaves_no_answer_for_the_next() -> None:
    async def main() -> None:
        async with open_worker() as (_, worker):
            await open_sessions(worker, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.do, piece(0, 0, 1000))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            await worker.do(Truncate(name(0), 0))
            assert (await worker.do(piece(0, 0, 1, 9))).hidden == exact_output(bytes([9] * EXACT_ROW), SPAN)

    trio.run(main)


def test_a_process_that_is_killed_fails_its_sessions_and_another_serves_new_ones() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told) as loader:
            await loader.open_model()
            worker = await loader.load(SPAN)
            loader.serves()
            await open_sessions(worker, 0, 1, 2)
            lost = []

            async def ask(session: int, value: int) -> None:
                with pytest.raises(WorkerLost, match=r"killed \(SIGKILL\)"):
                    await worker.do(piece(session, 0, 1, value))
                lost.append(session)

            await together(partial(ask, 0, DIE), partial(ask, 1, DIE), loader.wait_lost)
            assert sorted(lost) == [0, 1]
            assert worker.kv_tokens_free == 0
            with pytest.raises(WorkerLost):
                await worker.do(Open(name(3), SPAN, LENGTH, PeerId("client 3")))
            other = await loader.load(SPAN)
            await open_sessions(other, 3)
            for call in (
                partial(worker.do, piece(2, 0, 1)),
                partial(worker.do, Truncate(name(2), 0)),
                partial(worker.do, Fork(name(2), name(1), 0, 0)),
            ):
                with pytest.raises(WorkerLost):
                    await call()
            for session in range(3):
                await worker.do(Close(name(session)))
            await other.do(piece(3, 0, 1))
            assert other.kv_tokens_free == 9 * LENGTH
            with pytest.raises(LocalProtocolError):
                await worker.do(piece(2, 0, 1))
        assert told.lines == ["opening", "loading"] * 2
        assert len(told.lost) == 1
        assert told.lost[0].endswith("; its sessions are lost, and another is started in 0 s")

    trio.run(main)


def test_a_process_for_another_span_is_another_one_with_all_that_the_user_wants() -> None:
    """KV from before does not count, also after a crash: the new span gets the KV that fits beside its blocks."""

    async def main() -> None:
        told = Told()
        async with open_loader(told, kv_memory="20%") as loader:
            await loader.open_model()
            worker, pid = await loader.load(SPAN), loader.pid
            loader.serves()
            await open_sessions(worker, 0)
            await loader.drop()
            assert not psutil.pid_exists(pid), "and so all of its memory is given back"
            with pytest.raises(WorkerLost):
                await worker.do(piece(0, 0, 1))
            await worker.do(Close(name(0)))
            other = await loader.load(OTHER_SPAN)
            assert other.span == OTHER_SPAN
            assert loader.pid != pid
            assert other.kv_tokens == TOKENS_BESIDE_PID + loader.pid
            assert await other.do(Open(name(0), OTHER_SPAN, LENGTH, PeerId("client")))
            await other.do(piece(0, 0, 1))
        assert told.lost == [], "it was not lost"

    trio.run(main)


def test_a_process_that_does_not_answer_is_one_that_has_crashed() -> None:
    async def main() -> None:
        async with open_worker(answer_s=1.0) as (loader, worker):
            await open_sessions(worker, 0)
            await worker.do(piece(0, 0, 1))
            assert worker.busy_us > 0
            with pytest.raises(WorkerLost, match=r"not answered in 1 s"):
                await worker.do(piece(0, 1, 1, HANG))
            await loader.wait_lost()
            worker = await loader.load(SPAN)
            await open_sessions(worker, 1)
            await worker.do(piece(1, 0, 1))

    trio.run(main)


def test_no_batch_is_given_the_answer_to_one_that_ctrl_c_ended() -> None:
    async def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with open_worker(answer_s=1.0) as (_, worker):
            await open_sessions(worker, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    await worker.do(piece(0, 0, 1, HANG))
            with pytest.raises(WorkerLost, match="in the middle of a batch"):
                await worker.do(Truncate(name(0), 0))

    trio.run(
        main, restrict_keyboard_interrupt_to_checkpoints=True
    )  # as the program does: it comes here, within shields


def test_nothing_of_it_is_left_when_it_is_ended() -> None:
    async def main() -> None:
        async with open_worker() as (_, worker):  # trio and Python open files at their first use
            await open_sessions(worker, 0)
        files = psutil.Process().num_fds()
        async with open_worker() as (loader, worker):
            await open_sessions(worker, 0)
            await worker.do(piece(0, 0, 1000))
            pid = loader.pid
        assert not psutil.pid_exists(pid)
        assert psutil.Process().num_fds() == files

    trio.run(main)


def test_a_forward_that_hangs_does_not_outlive_the_node_that_is_ended() -> None:
    async def main() -> None:
        async with open_worker() as (loader, worker):
            await open_sessions(worker, 0)
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    with pytest.raises(WorkerLost, match="ended with its node"):
                        await worker.do(piece(0, 0, 1, HANG))

                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                loader.kill()

    trio.run(main)


NODE = """
import sys, trio
sys.path.insert(0, {tests!r})
from unit.compute.test_worker_process import open_sessions, open_worker, piece
async def main():
    async with open_worker() as (loader, worker):
        await open_sessions(worker, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.do, piece(0, 0, 1, {what}))
            print("ready", flush=True)
trio.run(main)
"""


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGKILL, HANG),
        (signal.SIGINT, HANG),
        pytest.param(
            signal.SIGKILL,
            SEIZE,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends who lets no thread run"),
        ),
    ],
)
def test_a_process_ends_with_its_node_in_the_middle_of_a_forward(number: signal.Signals, what: int) -> None:
    """The child has the node's stderr, which ends when both have ended."""
    code = NODE.format(tests=str(Path(__file__).parents[2]), what=what)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(node.pid).children()
        node.send_signal(number)
        if number == signal.SIGINT:  # trio waits for a forward in a thread
            child.kill()
        try:
            node.communicate(timeout=DEADLINE_S)
            assert node.returncode != 0
            psutil.wait_procs([child], timeout=DEADLINE_S)
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()
