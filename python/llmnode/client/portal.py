"""The one way from synchronous code into trio: an event loop in a thread of its own.

It works from a script, from any thread, and from a notebook whose own event loop is running. A trio program does not
need it and uses the async functions. The garbage collector may run in the loop's own thread, which must not wait for
the loop. Objects that it closes leave with `leave_soon`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum, auto
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import trio

from llmnode.errors import ConfigError, SessionClosed, single_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

T = TypeVar("T")


class _End(Enum):
    """Comes after all that a stream gives."""

    END = auto()


class Portal:
    """Runs async functions for threads that wait for them. Made by `open_portal`; a context manager."""

    def __init__(self, thread: threading.Thread, token: trio.lowlevel.TrioToken, nursery: trio.Nursery) -> None:
        self._thread = thread
        self._token = token
        self._nursery = nursery
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run `function` in the event loop and wait for it. Ctrl-C in the waiting thread cancels it.

        Raises the errors of `function`, SessionClosed if the portal closes meanwhile, and RuntimeError from inside the
        loop itself, which would wait for ever. Raises ConfigError in a fork of the process, which has no loop.
        """
        answer: Future[T] = Future()
        scope = trio.CancelScope()

        async def run() -> None:
            with scope, _reported_to(answer):
                answer.set_result(await function())

        self.start(run, answer)
        return self.wait(answer, scope)

    def stream(self, function: Callable[[Callable[[T], None]], Awaitable[object]]) -> Iterator[T]:
        """Run `function` in the event loop. It gets a callback, and each value that it passes to that is yielded.

        It does not wait for the iterating thread. If that thread is interrupted, or leaves the loop, `function` is
        cancelled, and has ended before the interrupt is raised. Values from before that come first. Raises as `call`,
        after all values from before the error.
        """
        given: SimpleQueue[T | _End] = SimpleQueue()
        answer: Future[None] = Future()
        scope = trio.CancelScope()
        answer.add_done_callback(lambda _answer: given.put(_End.END))

        async def run() -> None:
            with scope, _reported_to(answer):
                await function(given.put)
                answer.set_result(None)

        self.start(run, answer)
        try:
            while (each := given.get()) is not _End.END:
                yield each
        except GeneratorExit:
            self._cancel(scope, answer)
            raise
        except BaseException:  # an interrupt
            self._cancel(scope, answer)
            while (each := given.get()) is not _End.END:
                yield each
            raise
        answer.result()

    def _cancel(self, scope: trio.CancelScope, answer: Future[Any]) -> None:
        self.tell(scope.cancel)
        answer.exception()

    def enter(self, manager: AbstractAsyncContextManager[T]) -> Entered[T]:
        """Enter an async context manager in the loop, in a task that lives until the result is closed."""
        entered = self.begin(manager)
        self.wait(entered.opened, entered.scope)
        return entered

    def begin(self, manager: AbstractAsyncContextManager[T]) -> Entered[T]:
        """Like `enter`, without waiting: `wait` for what the result has `opened`, or `cancel` it."""
        entered = Entered[T](self)
        self.start(lambda: entered.hold(manager), entered.opened)
        return entered

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that has the loop: then nothing here ever answers."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Cancel everything that runs in the loop, end it and its thread. Safe to call twice."""
        self.tell(self._nursery.cancel_scope.cancel)
        self._thread.join()

    def start(self, function: Callable[[], Awaitable[None]], waiter: Future[T]) -> None:
        """Start a task; `waiter` is told if that cannot be done any more."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the event loop's own thread: await the async function instead")
        if self.is_forked:
            raise ConfigError("a connection to the swarm does not live on in a forked process: connect in that process")

        def start() -> None:
            try:
                self._nursery.start_soon(function)
            except RuntimeError:  # the nursery has just closed
                waiter.set_exception(_closed())

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError:
            raise _closed() from None

    def tell(self, function: Callable[[], object]) -> None:
        """Call `function` in the loop, if that still runs."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def wait(self, waiter: Future[T], scope: trio.CancelScope) -> T:
        try:
            return waiter.result()
        except BaseException:  # an interrupt, or an error of the caller's signal handlers
            if not waiter.done():
                self.tell(scope.cancel)
            raise


class Entered(Generic[T]):
    """An async context manager that is entered in a portal's loop; a context manager itself."""

    def __init__(self, portal: Portal) -> None:
        self.opened: Future[T] = Future()
        self.scope = trio.CancelScope()
        self._portal = portal
        self._leave = trio.Event()
        self._left: Future[None] = Future()

    def __enter__(self) -> T:
        return self.opened.result()

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the context, and wait until it is left. Raises the errors of leaving it.

        It may be called twice, and after the portal, which has ended it. Does nothing in a fork of the process.
        """
        if self._portal.is_forked:
            return
        self.leave_soon()
        with contextlib.suppress(SessionClosed):
            self._left.result()

    def leave_soon(self) -> None:
        """Leave the context and wait for nothing: for any thread, the loop's own too."""
        self._portal.tell(self._leave.set)

    def cancel(self) -> None:
        """Give it up, whether it is entered or not, and wait for nothing."""
        self._portal.tell(self.scope.cancel)

    async def hold(self, manager: AbstractAsyncContextManager[T]) -> None:
        """The task in the loop."""
        with self.scope, _reported_to(self._left), _reported_to(self.opened):
            async with manager as value:
                self.opened.set_result(value)
                await self._leave.wait()
        if not self._left.done():
            self._left.set_result(None)


def open_portal() -> Portal:
    """Start the loop's thread. Close the portal to end it."""
    opened: Future[Portal] = Future()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            opened.set_result(Portal(thread, trio.lowlevel.current_trio_token(), nursery))
            await trio.sleep_forever()

    # A daemon: a program that forgets to close its model must still be able to end.
    thread = threading.Thread(target=trio.run, args=(main,), name="llmnode", daemon=True)
    thread.start()
    return opened.result()


@contextmanager
def _reported_to(waiter: Future[T]) -> Iterator[None]:
    """An error inside is raised in the waiting thread, and not in the loop; a cancellation in both."""
    try:
        with single_error():
            yield
    except trio.Cancelled:
        if not waiter.done():
            waiter.set_exception(_closed())
        raise
    except Exception as error:
        if waiter.done():
            raise
        waiter.set_exception(error)
    except BaseException:  # a group of several cancellations, as of the rows of a batch
        if not waiter.done():
            waiter.set_exception(_closed())
        raise


def _closed() -> SessionClosed:
    return SessionClosed("the connection to the swarm is closed")
