"""One life of a worker's own process, as the node sees it: it does one thing at a time, and may be lost."""

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

from llmnode.compute.shared import SharedMemory, make_shared_memory
from llmnode.compute.work import Done, Work, failed
from llmnode.compute.worker_messages import (
    ANSWER,
    FAILED,
    HELLO,
    SAID,
    WORK,
    Message,
    Messages,
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
RECEIVE_BYTES = 1 << 16


class WorkerProcess:
    """One life of a worker's process, and the `Held` port of its span. Made by `start_process`. Always `end` it."""

    def __init__(
        self,
        process: trio.Process,
        node: socket.socket,
        memory: tuple[SharedMemory, SharedMemory],
        policy: WorkerPolicy,
    ) -> None:
        """`memory` is for requests and results."""
        self._process = process
        self._socket = node
        self._requests, self._results = memory
        self._policy = policy
        self._messages = Messages()
        self._why = ""
        """It was ended, if by us."""
        self._span: Span | None = None
        self._kv_tokens_free = 0
        self._row_bytes = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return bool(self._why) or self._process.poll() is not None

    @property
    def span(self) -> Span:
        assert self._span is not None, "blocks are loaded first"
        return self._span

    def kv_tokens_free(self) -> int:
        return 0 if self.has_ended else self._kv_tokens_free

    def holds(self, span: Span, kv_tokens_free: int, row_bytes: int) -> None:
        """Record what it has loaded. `row_bytes` is the size of a position's hidden state."""
        self._span, self._kv_tokens_free, self._row_bytes = span, kv_tokens_free, row_bytes

    async def say_hello(self) -> None:
        """Until it has started. Raises WorkerLost."""
        with trio.move_on_after(self._policy.hello_s):
            (word,) = await self._receive()
            assert word == HELLO
            return
        self.kill(f"has not started in {self._policy.hello_s:g} s")
        raise await self._lost()

    async def ask(self, word: str, *arguments: Any, report: Callable[[str], None]) -> Any:  # Any: as each has them
        """Ask something that may take any time while the process makes progress. Raises its error, or WorkerLost.

        `report` gets each line of the process, and a line from time to time while it works.
        """
        await self._send(pack_message(word, *arguments))
        began_s = trio.current_time()
        progress = Progress(self._effort(), began_s)
        while True:
            with trio.move_on_after(self._policy.look_s):
                word, *rest = await self._receive()
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

    def run(self, work: Work) -> Awaitable[tuple[Done, float, float]]:
        """Have a batch done, which begins now.

        Its begin and end are by `time.perf_counter`, without the time of the way back. The awaitable raises nothing: if
        the process is lost, all of the batch has failed.
        """
        asked_bytes = input_bytes(work)
        given_bytes = output_bytes(work, self._row_bytes)
        if self.has_ended:
            return self._finish(work, memoryview(b""), given_bytes)
        try:
            self._requests.grow(asked_bytes)
            self._results.grow(given_bytes)
            message = pack_message(WORK, *put_work(work, self._requests.view(asked_bytes)), asked_bytes, given_bytes)
        except (OSError, MemoryError) as error:
            return _failed(work, MemoryError(f"no memory to hand work over in: {error}"))
        return self._finish(work, self._send_some(message), given_bytes)

    async def _finish(self, work: Work, unsent: memoryview, given_bytes: int) -> tuple[Done, float, float]:
        try:
            with trio.move_on_after(self._policy.answer_s):
                if self.has_ended:
                    raise await self._lost()
                await self._send(unsent)
                _word, (*given, took_s, self._kv_tokens_free) = await self._receive()
                done = take_done(given, self._results.view(given_bytes))
                ended_s = time.perf_counter()
                return done, ended_s - took_s, ended_s
            self.kill(f"has not answered in {self._policy.answer_s:g} s")
            lost = await self._lost()
        except WorkerLost as error:
            lost = error
        return await _failed(work, lost)

    async def wait_lost(self) -> WorkerLost:
        """How it has ended, once it has."""
        await self._process.wait()
        return await self._lost()

    def kill(self, why: str) -> None:
        if not self.has_ended:
            self._why = why
        self._process.kill()

    async def end(self) -> None:
        """Nothing is left of it then. Cannot be cancelled."""
        with trio.CancelScope(shield=True):
            self.kill("was ended with its node")
            await self._process.wait()
            assert self._process.stdin is not None
            await self._process.stdin.aclose()
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
        self._requests.close()
        self._results.close()

    def _effort(self) -> Effort:
        try:
            process = psutil.Process(self.pid)
            times = process.cpu_times()
            return Effort(times.user + times.system, process.memory_info().rss)
        except psutil.Error:  # it has just ended
            return Effort(0.0, 0)

    def _send_some(self, message: bytes) -> memoryview:
        """Send the bytes that the socket takes now, usually all. Returns the rest, even if the process is lost.

        These are plain calls: with trio's own streams a decode's way there and back takes 1.5 times the time.
        """
        left = memoryview(message)
        with suppress(OSError):
            left = left[self._socket.send(left) :]
        return left

    async def _send(self, message: bytes | memoryview) -> None:
        left = memoryview(message)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
            except OSError:
                raise await self._lost() from None

    async def _receive(self) -> Message:
        """The next message. Raises WorkerLost."""
        while True:
            for message in self._messages:
                return message
            try:
                await trio.lowlevel.wait_readable(self._socket)
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                data = b""
            if not data:
                raise await self._lost()
            self._messages.feed(data)

    async def _lost(self) -> WorkerLost:
        """The process has ended or is about to. The error explains its exit status."""
        with trio.move_on_after(self._policy.end_s):
            await self._process.wait()
        if self._process.returncode is None:
            self.kill("hung up, and lived on")
            await self._process.wait()
        assert self._process.returncode is not None
        return WorkerLost(f"the worker process {self._why or _how_it_ended(self._process.returncode)}")


def can_start() -> bool:
    """Whether `sys.executable` is a Python: in a program that embeds one, or was frozen, it is that program."""
    is_python = Path(sys.executable or "").name.startswith(("python", "pypy"))
    return os.name == "posix" and is_python and not getattr(sys, "frozen", False)


async def start_process(command: Sequence[str], policy: WorkerPolicy) -> WorkerProcess:
    """It has yet to `say_hello`. Raises WorkerLost if the system has no memory for one more process."""
    ours, theirs = socket.socketpair()
    memory = make_shared_memory(), make_shared_memory()
    try:
        process = await _open(command, theirs, memory)
    except OSError as error:
        for each in (ours, *memory):
            each.close()
        raise WorkerLost(f"a worker process cannot be started: {error}") from error
    finally:
        theirs.close()
    ours.setblocking(False)
    return WorkerProcess(process, ours, memory, policy)


async def _failed(work: Work, error: Exception) -> tuple[Done, float, float]:
    now_s = time.perf_counter()
    return failed(work, error), now_s, now_s


async def _open(
    command: Sequence[str], theirs: socket.socket, memory: tuple[SharedMemory, SharedMemory]
) -> trio.Process:
    files = (theirs.fileno(), *(each.file for each in memory))
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
