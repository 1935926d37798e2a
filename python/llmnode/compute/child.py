"""A worker's own process: `python -m llmnode.compute.child`, by `worker_process.py`. Its arguments are open files.

It does what the node asks over the first socket, one thing after another, and ends with the node, however that ends.
A thread of lower priority computes the passes that it asks for over the second one, and another does the loads that it
asks for over the third, while an executor works. The other files are the memory for requests and results: two of the
first socket, two of the second.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.compute.shared import SharedMemory
from llmnode.compute.work import do
from llmnode.compute.worker_messages import (
    ANSWER,
    CANDIDATES,
    DROP,
    FAILED,
    FITTING_BLOCKS,
    HELLO,
    LOAD,
    OPEN_MODEL,
    SAID,
    WORK,
    Message,
    Messages,
    pack_error,
    pack_message,
    put_done,
    take_work,
)
from llmnode.core.model import precision_named
from llmnode.core.span import Span
from llmnode.core.texts.log_lines import log_to
from llmnode.core.texts.visible import VisibleStream
from llmnode.errors import LlmnodeError
from llmnode.machine.startup import free_dropped
from llmnode.models.sources.online import keep_libraries_offline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.compute.work import Done
    from llmnode.ports import Executor, Loaded, Loader

    MakeLoader = Callable[[Wanted, Callable[[str], None]], Loader]

RECEIVE_BYTES = 1 << 16
SWITCH_S = 0.0005
"""The threads that load and compute passes must not keep a batch waiting for longer than this, and it is for Python's
lock often."""
NICER = 5
"""On Linux the thread of passes has a third of the processor time of other threads that want it too. If it had much
less, it would not let go of Python's lock for long once another program keeps it from running."""

log = logging.getLogger(__name__)


def serve_node(make_loader: MakeLoader) -> NoReturn:
    """The whole life of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the node, which may have sessions to end before
        signal.signal(number, signal.SIG_IGN)
    _end_with_node()
    sys.stderr = VisibleStream(sys.stderr)
    log_to(logging.StreamHandler(), logging.WARNING, "llmnode: %(message)s")
    node, passes, loads, *memory = map(int, sys.argv[1:])
    requests, results, pass_requests, pass_results = map(SharedMemory, memory)
    way = _Way(socket.socket(fileno=node), requests, results)
    way_of_passes = _Way(socket.socket(fileno=passes), pass_requests, pass_results)
    _Child(way, way_of_passes, socket.socket(fileno=loads), make_loader).run()
    os._exit(0)  # a load that nobody waits for is not waited for


def _end_with_node() -> None:
    """The node holds our stdin open, and writes nothing; however it ends, so do we, in the middle of a forward too.

    On Linux even in one that hangs without ever letting another thread of Python's run: the kernel sees to it. (A
    PR_SET_PDEATHSIG would come when the thread ends that has started us, and trio's threads end when they are idle.)
    """
    if sys.platform == "linux":
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
        has_ended_before, _, _ = select.select([0], [], [], 0)
        if has_ended_before:
            os._exit(0)
    else:
        threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(0)


class _Way(NamedTuple):
    """The way of batches from the node and back."""

    node: socket.socket
    requests: SharedMemory
    results: SharedMemory


class _Child:
    def __init__(self, way: _Way, way_of_passes: _Way, loads: socket.socket, make_loader: MakeLoader) -> None:
        self._way, self._way_of_passes, self._loads = way, way_of_passes, loads
        self._make_loader = make_loader
        self._loader: Loader | None = None
        self._executors: dict[int, Executor] = {}
        self._unwanted: set[int] = set()
        """The numbers of executors that were dropped, some of them before they were loaded."""
        self._loading = threading.local()
        """Its `number` is that of the load, in the thread of `_load_beside`."""
        self._one_change = threading.Lock()
        """To what is held, and what is unwanted."""

    def run(self) -> None:
        self._send(HELLO)
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=self._load_beside, daemon=True).start()
        threading.Thread(target=self._compute_passes, daemon=True).start()
        for word, *arguments in _messages(self._way.node):
            if word == WORK:
                self._send(ANSWER, self._worked(self._way, *arguments))
            else:
                self._send(*self._answer(word, arguments))

    def _compute_passes(self) -> None:
        """The life of the thread that computes passes beside all else."""
        if sys.platform == "linux":  # elsewhere it would be the priority of the process
            os.nice(NICER)
        way = self._way_of_passes
        try:
            for _word, *message in _messages(way.node):
                way.node.sendall(pack_message(ANSWER, self._worked(way, *message)))
        except BaseException as error:
            log.critical("in the worker process", exc_info=error)
            os._exit(1)  # as it would in the first thread: else the node would wait for an answer

    def _load_beside(self) -> None:
        """The life of the thread that loads while another executor works."""
        for _word, number, *asked in _messages(self._loads):
            self._loading.number = number
            try:
                answer = [ANSWER, number, self._loaded(number, *asked)]
            except Exception as error:  # noqa: BLE001  it is raised in the node
                if not isinstance(error, _Unwanted):
                    _log_if_unforeseen(error)
                answer = [FAILED, number, *pack_error(error)]
            self._loads.sendall(pack_message(*answer))
            if number in self._unwanted:
                free_dropped()

    def _loaded(self, number: int, beside: int, start: int, end: int, kv_tokens: int) -> Message | None:
        assert self._loader is not None, "the model is opened first"
        loaded = self._loader.load_beside(Span(start, end), self._executors[beside], kv_tokens)
        return None if loaded is None else self._hold(number, loaded)

    def _hold(self, number: int, loaded: Loaded) -> Message:
        with self._one_change:
            if number not in self._unwanted:
                self._executors[number] = loaded.executor
        executor = loaded.executor
        held = executor.kv_tokens_free(), executor.kv_page, loaded.position_bytes, executor.passes_beside
        return [loaded.tensor_bytes, *held]

    def _drop(self, number: int) -> None:
        with self._one_change:
            self._unwanted.add(number)
            held = self._executors.pop(number, None)
        if held is not None:
            del held
            free_dropped()

    def _say(self, line: str) -> None:
        """From whichever thread loads."""
        number = getattr(self._loading, "number", None)
        if number is None:
            self._send(SAID, line)
        elif number in self._unwanted:
            raise _Unwanted
        else:
            self._loads.sendall(pack_message(SAID, number, line))

    def _send(self, *message: Any) -> None:  # Any: what msgpack can hold
        self._way.node.sendall(pack_message(*message))

    def _answer(self, word: str, arguments: Message) -> Message:
        try:
            return [ANSWER, self._ask(word, *arguments)]
        except Exception as error:  # noqa: BLE001  it is raised in the node
            _log_if_unforeseen(error)
            return [FAILED, *pack_error(error)]

    def _ask(self, word: str, *arguments: Any) -> Any:  # Any: as each question has them
        if word == OPEN_MODEL:
            self._loader = self._make_loader(Wanted(**arguments[0]), self._say)
            return asdict(self._loader.open_model())
        if word == DROP:
            return self._drop(*arguments)
        assert self._loader is not None, "the model is opened first"
        if word == FITTING_BLOCKS:
            return self._loader.fitting_blocks()
        if word == CANDIDATES:
            found = self._loader.candidates([precision_named(each) for each in arguments])
            return [[each.precision.name, each.blocks, each.pace, each.is_emulated] for each in found]
        assert word == LOAD
        number, start, end = arguments
        return self._hold(number, self._loader.load(Span(start, end)))

    def _worked(self, way: _Way, *message: Any) -> Message:  # Any: what `put_work` gives, and the sizes of both ways
        """The answer to a batch. When it is sent, this thread has let go of the executor, which may be dropped then."""
        number, *packed, asked_bytes, given_bytes = message
        executor = self._executors[number]
        work = take_work(packed, way.requests.view(asked_bytes))
        began_s = time.perf_counter()
        done = do(executor, work)
        took_s = time.perf_counter() - began_s
        _log_unforeseen(done)
        answer = put_done(done, way.results.view(given_bytes))
        return [*answer, took_s, executor.kv_tokens_free()]


class _Unwanted(Exception):
    """Nobody waits for what is being loaded."""


def _messages(node: socket.socket) -> Iterator[Message]:
    messages = Messages()
    while data := node.recv(RECEIVE_BYTES):
        messages.feed(data)
        yield from messages


def _log_unforeseen(done: Done) -> None:
    for outcome in (*done.results, *done.outputs, *done.passed):
        if isinstance(outcome, Exception):
            _log_if_unforeseen(outcome)


def _log_if_unforeseen(error: Exception) -> None:
    """The node tells of others, but does not know where in here they happened."""
    if not isinstance(error, (LlmnodeError, RuntimeError, MemoryError)):
        log.error("in the worker process", exc_info=error)


if __name__ == "__main__":
    keep_libraries_offline()
    serve_node(SpanLoader)
