"""Stops a program that runs until it is told: by a signal or by the end of its stdin, in order or at once."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import trio

from llmnode.errors import ConfigError, single_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def run_async(act: Callable[[*Arguments], Awaitable[T]], *arguments: *Arguments) -> T:
    """Runs `act` to its end by trio, and returns its result. Ctrl-C comes at one of its checkpoints alone.

    Anywhere else it could come in the middle of what trio or a library notes for itself. One client in a hundred, which
    was interrupted as it began, then never ended.
    """
    return trio.run(act, *arguments, restrict_keyboard_interrupt_to_checkpoints=True)


class StopRequest:
    """Until `in_order` is called, a request to stop ends everything at once; after it, `requested` is set first."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self.requested = trio.Event()
        self.by_signal = False
        """The program or user that asked is still there, and so may be our clients."""
        self.is_interrupted = False
        """By Ctrl-C, before it could be in order."""
        self._scope = scope
        self.is_in_order = False

    def in_order(self) -> None:
        """From now on there is somebody to say goodbye to."""
        self.is_in_order = True

    def request(self) -> None:
        """The second time, nobody waits for goodbyes."""
        if not self.is_in_order or self.requested.is_set():
            self._scope.cancel()
        self.requested.set()


@asynccontextmanager
async def stopped_by_signals(
    *, until_stdin_closes: bool = False, ends_by_ctrl_c: bool = False
) -> AsyncIterator[StopRequest]:
    """The body is told by SIGINT and SIGTERM to stop and, if asked for, by the end of stdin.

    Raises KeyboardInterrupt after a Ctrl-C before `in_order`, unless that is how it always ends: `ends_by_ctrl_c`.
    Raises ConfigError if stdin is a terminal, or none.
    """
    if until_stdin_closes and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("--until-stdin-closes needs stdin to be a pipe from the program that starts the server")
    with single_error():
        async with trio.open_nursery() as nursery:
            stop = StopRequest(nursery.cancel_scope)
            await nursery.start(_on_signals, stop, not ends_by_ctrl_c)
            if until_stdin_closes:
                nursery.start_soon(_on_stdin_end, stop)
            yield stop
            nursery.cancel_scope.cancel()
        if stop.is_interrupted:
            raise KeyboardInterrupt


async def _on_signals(stop: StopRequest, can_interrupt: bool, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            stop.by_signal = True
            stop.is_interrupted |= can_interrupt and number == signal.SIGINT and not stop.is_in_order
            stop.request()


async def _on_stdin_end(stop: StopRequest) -> None:
    """A parent holds our stdin open; however it ends, so do we."""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        while await stdin.receive_some(1024):
            pass
    stop.request()
