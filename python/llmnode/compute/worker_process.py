"""One life of a worker's own process, as the node sees it. It may be lost.

It does one thing at a time, but for passes, and for one load beside the executor that it has. Then it has two, which
take turns.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import trio

from llmnode.compute.conversation import Conversation, Ended
from llmnode.compute.shared import SharedMemory, make_shared_memory
from llmnode.compute.work import Done, Work, failed
from llmnode.compute.worker_messages import (
    ANSWER,
    DROP,
    FAILED,
    HELLO,
    LOAD_BESIDE,
    SAID,
    WORK,
    Message,
    input_bytes,
    output_bytes,
    pack_message,
    put_work,
    take_done,
    unpack_error,
)
from llmnode.core.serving.progress import Effort, Progress
from llmnode.errors import WorkerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.policy import WorkerPolicy
    from llmnode.core.span import Span

COMMAND = (sys.executable, "-P", "-m", "llmnode.compute.child")


class _Way:
    """A way to the executors of the process and back: `talk` is about one batch after another."""

    def __init__(self, talk: Conversation, requests: SharedMemory, results: SharedMemory) -> None:
        self.talk, self.requests, self.results = talk, requests, results
        self.turn = trio.Semaphore(1)
        """To have it do something: its executors come one after the other."""

    def close(self) -> None:
        self.talk.close()
        self.requests.close()
        self.results.close()


class WorkerProcess:
    """One life of a worker's process. Made by `start_process`. Always `end` it."""

    def __init__(
        self, process: trio.Process, way: _Way, way_of_passes: _Way, loads: Conversation, policy: WorkerPolicy
    ) -> None:
        """`loads` is the conversation about loads beside work. `way_of_passes` has the passes beside all else."""
        self._process = process
        self._way, self._way_of_passes, self._loads = way, way_of_passes, loads
        self._policy = policy
        self._why = ""
        """It was ended, if by us."""
        self._is_closing = False
        """It was killed, and is asked for nothing more. Whether it still runs is a question to the system, which takes
        time: batches hear of its end from the conversation."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return bool(self._why) or self._process.poll() is not None

    async def say_hello(self) -> None:
        """Until it has started. Raises WorkerLost."""
        with trio.move_on_after(self._policy.hello_s):
            (word,) = await self._receive(self._way.talk)
            assert word == HELLO
            return
        self.kill(f"has not started in {self._policy.hello_s:g} s")
        raise await self._lost()

    async def ask(self, word: str, *arguments: Any, report: Callable[[str], None]) -> Any:  # Any: as each has them
        """Ask something that may take any time while the process makes progress. Raises its error, or WorkerLost.

        `report` gets each line of the process, and a line from time to time while it works.
        """
        await self._send(self._way.talk, pack_message(word, *arguments))
        return await self._answer(self._way.talk, report)

    async def load_beside(self, number: int, *arguments: Any, report: Callable[[str], None]) -> Any:
        """Ask for a load, of that `number`, while work goes on. `arguments` are those of LOAD_BESIDE.

        Raises and reports as `ask`; work is progress too. If it is cancelled, `drop` the number.
        """
        await self._send(self._loads, pack_message(LOAD_BESIDE, number, *arguments))
        return await self._answer(self._loads, report, number)

    async def _answer(self, talk: Conversation, report: Callable[[str], None], number: int | None = None) -> Any:
        """The answer to `ask`, or to the load of that `number`."""
        began_s = trio.current_time()
        progress = Progress(self._effort(), began_s)
        while True:
            with trio.move_on_after(self._policy.look_s):
                word, *rest = await self._receive(talk)
                if number is not None and rest.pop(0) != number:
                    continue  # of a load that nobody waits for any more
                if word == ANSWER:
                    return rest[0]
                if word == FAILED:
                    raise unpack_error(rest)
                assert word == SAID
                report(*rest)
                continue
            now_s = trio.current_time()
            progress = progress.seen(self._effort(), now_s)
            if progress.is_stuck(now_s, self._policy.stuck_s):
                self.kill(f"has neither read nor computed anything in {self._policy.stuck_s:g} s while it loaded")
                raise await self._lost()
            effort = progress.effort
            report(
                f"still at it after {now_s - began_s:.0f} s: the worker has taken {effort.cpu_s:.0f} s of CPU time and "
                f"{effort.memory_bytes >> 20} MiB"
            )

    async def drop(self, number: int) -> None:
        """Drop an executor, while no batch and no pass runs, or have a load given up. Does nothing once the process is
        lost.

        One that does not answer in time has crashed, as in a batch.
        """
        async with self._way_of_passes.turn, self._way.turn:
            with suppress(WorkerLost):
                with trio.move_on_after(self._policy.answer_s):
                    await self._send(self._way.talk, pack_message(DROP, number))
                    await self._receive(self._way.talk)
                    return
                self.kill(self._is_late)

    def run(self, held: HeldSpan, work: Work) -> Awaitable[tuple[Done, float, float]]:
        """Have a batch done, which begins now unless another executor of the process works.

        Its begin and end are by `time.perf_counter`, without the time of the way back. The awaitable is shielded, and
        raises nothing: if the process is lost, all of the batch has failed.
        """
        way = self._way_of_passes if work.passes and held.passes_beside else self._way
        try:
            way.turn.acquire_nowait()
        except trio.WouldBlock:
            return self._run_in_turn(way, held, work)
        return self._run(way, held, work)

    async def _run_in_turn(self, way: _Way, held: HeldSpan, work: Work) -> tuple[Done, float, float]:
        with trio.CancelScope(shield=True):
            await way.turn.acquire()
        return await self._run(way, held, work)

    def _run(self, way: _Way, held: HeldSpan, work: Work) -> Awaitable[tuple[Done, float, float]]:
        try:
            asked_bytes = input_bytes(work)
            given_bytes = output_bytes(work, held.row_bytes)
            if self._is_closing:
                return self._finish(way, held, work, memoryview(b""), given_bytes)
            way.requests.grow(asked_bytes)
            way.results.grow(given_bytes)
            put = put_work(work, way.requests.view(asked_bytes))
            message = pack_message(WORK, held.number, *put, asked_bytes, given_bytes)
            return self._finish(way, held, work, way.talk.send_some(message), given_bytes)
        except (OSError, MemoryError) as error:
            way.turn.release()
            return _failed(work, MemoryError(f"no memory to hand work over in: {error}"))
        except BaseException:
            way.turn.release()
            raise

    async def _finish(
        self, way: _Way, held: HeldSpan, work: Work, unsent: memoryview, given_bytes: int
    ) -> tuple[Done, float, float]:
        try:
            with trio.move_on_after(self._policy.answer_s, shield=True):
                if self._is_closing:
                    raise await self._lost()
                await self._send(way.talk, unsent)
                _word, (*given, took_s, free) = await self._receive(way.talk)
                if way is self._way:  # a pass changes no KV, and may have begun before other work that has
                    held.free = free
                done = take_done(given, way.results.view(given_bytes))
                ended_s = time.perf_counter()
                return done, ended_s - took_s, ended_s
            self.kill(self._is_late)
            with trio.CancelScope(shield=True):
                lost = await self._lost()
        except WorkerLost as error:
            lost = error
        except BaseException:  # Ctrl-C: trio raises it in its first task, within shields too
            self.kill("was left in the middle of a batch")  # the next batch would be given the answer to this one
            raise
        finally:
            way.turn.release()
        return await _failed(work, lost)

    async def wait_lost(self) -> WorkerLost:
        """How it has ended, once it has."""
        await self._process.wait()
        return await self._lost()

    @property
    def _is_late(self) -> str:
        return f"has not answered in {self._policy.answer_s:g} s"

    def kill(self, why: str) -> None:
        if not self.has_ended:
            self._why = why
        self._is_closing = True
        self._process.kill()

    async def end(self) -> None:
        """Nothing is left of it then. Cannot be cancelled."""
        with trio.CancelScope(shield=True):
            self.kill("was ended with its node")
            await self._process.wait()
            assert self._process.stdin is not None
            await self._process.stdin.aclose()
        for each in (self._way, self._way_of_passes, self._loads):
            each.close()

    def _effort(self) -> Effort:
        try:
            process = psutil.Process(self.pid)
            times = process.cpu_times()
            return Effort(times.user + times.system, process.memory_info().rss)
        except psutil.Error:  # it has just ended
            return Effort(0.0, 0)

    async def _send(self, talk: Conversation, message: bytes | memoryview) -> None:
        try:
            await talk.send(message)
        except Ended:
            raise await self._lost() from None

    async def _receive(self, talk: Conversation) -> Message:
        """The next message. Raises WorkerLost."""
        try:
            return await talk.receive()
        except Ended:
            raise await self._lost() from None

    async def _lost(self) -> WorkerLost:
        """The process has ended or is about to. The error explains its exit status."""
        with trio.move_on_after(self._policy.end_s):
            await self._process.wait()
        if self._process.returncode is None:
            self.kill("hung up, and lived on")
            await self._process.wait()
        assert self._process.returncode is not None
        return WorkerLost(f"the worker process {self._why or _how_it_ended(self._process.returncode)}")


class HeldSpan:
    """The `Held` port of one executor in the process."""

    def __init__(
        self, process: WorkerProcess, number: int, span: Span, loaded: tuple[int, int, int, int, bool], row_bytes: int
    ) -> None:
        """`loaded` is what the process says of it, and `row_bytes` the size of a position's hidden state."""
        self.number, self.span, self.row_bytes = number, span, row_bytes
        self.tensor_bytes, self.free, self.kv_page, self.position_bytes, self.passes_beside = loaded
        self.is_dropped = False
        self._process = process

    def kv_tokens_free(self) -> int:
        return 0 if self._process.has_ended or self.is_dropped else self.free

    def run(self, work: Work) -> Awaitable[tuple[Done, float, float]]:
        """Have a batch done: see `WorkerProcess.run`."""
        if self.is_dropped:
            return _failed(work, WorkerLost("this server serves other blocks now"))
        return self._process.run(self, work)


def can_start() -> bool:
    """Whether `sys.executable` is a Python: in a program that embeds one, or was frozen, it is that program."""
    is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
    return os.name == "posix" and is_python and not getattr(sys, "frozen", False)


async def start_process(command: Sequence[str], policy: WorkerPolicy) -> WorkerProcess:
    """It has yet to `say_hello`. Raises WorkerLost if the system has no memory for one more process."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    memory = [make_shared_memory() for _ in range(4)]
    try:
        process = await _open(command, *(each.fileno() for each in theirs), *(each.file for each in memory))
    except OSError as error:
        for each in (*ours, *memory):
            each.close()
        raise WorkerLost(f"a worker process cannot be started: {error}") from error
    finally:
        for end in theirs:
            end.close()
    talk, of_passes, loads = map(Conversation, ours)
    return WorkerProcess(process, _Way(talk, *memory[:2]), _Way(of_passes, *memory[2:]), loads, policy)


async def _failed(work: Work, error: Exception) -> tuple[Done, float, float]:
    now_s = time.perf_counter()
    return failed(work, error), now_s, now_s


async def _open(command: Sequence[str], *files: int) -> trio.Process:
    return await trio.lowlevel.open_process(
        [*command, *map(str, files)],
        stdin=subprocess.PIPE,  # it ends when this does
        stdout=subprocess.DEVNULL,  # ours may be read by a program
        pass_fds=files,
        env=_environment(),
        start_new_session=True,  # a Ctrl-C in the terminal is ours alone
    )


def _environment() -> dict[str, str]:
    """Our environment, with our `sys.path`: the process finds llmnode where this program has found it.

    Idle threads of torch's sleep there, unless the user says otherwise: by default they spin, on cores of other nodes.
    """
    path = os.pathsep.join(each or os.curdir for each in sys.path)
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path}


def _how_it_ended(returncode: int) -> str:
    if returncode == -signal.SIGKILL:
        return "was killed (SIGKILL), which is what happens when memory runs out"
    if returncode < 0:
        return f"crashed ({signal.Signals(-returncode).name})"
    return f"ended with exit status {returncode}"
