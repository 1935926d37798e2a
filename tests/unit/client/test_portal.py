"""Synchronous code in trio: results, errors, lifetimes, Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.client.portal import open_portal
from llmnode.errors import ConfigError, SessionClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


async def _double(number: int) -> int:
    await trio.lowlevel.checkpoint()
    return 2 * number


async def _fail() -> None:
    async with trio.open_nursery():
        raise ConfigError("from within a nursery")


def test_a_call_returns_what_the_function_returns() -> None:
    with open_portal() as portal:
        assert portal.call(lambda: _double(21)) == 42


def test_an_error_is_raised_where_it_is_waited_for_and_not_as_a_group() -> None:
    with open_portal() as portal:
        with pytest.raises(ConfigError, match="from within a nursery"):
            portal.call(_fail)
        assert portal.call(lambda: _double(1)) == 2, "the loop goes on"


def test_many_threads_at_once() -> None:
    answers: dict[int, int] = {}
    with open_portal() as portal:

        def ask(number: int) -> None:
            answers[number] = portal.call(lambda: _double(number))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {number: 2 * number for number in range(20)}


def test_it_works_inside_a_running_asyncio_loop() -> None:
    """A notebook does this."""

    async def cell() -> int:
        with open_portal() as portal:
            return portal.call(lambda: _double(4))

    assert asyncio.run(cell()) == 8


def test_a_call_from_the_loop_itself_is_refused() -> None:
    with open_portal() as portal:

        async def nested() -> int:
            return portal.call(lambda: _double(1))

        with pytest.raises(RuntimeError, match="await the async function"):
            portal.call(nested)


def test_a_context_is_entered_and_left_in_the_loop() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        events.append("entered")
        try:
            yield "value"
        finally:
            await trio.lowlevel.checkpoint()
            events.append("left")

    with open_portal() as portal:
        with portal.enter(manager()) as value:
            assert value == "value"
            assert events == ["entered"]
        assert events == ["entered", "left"]


def test_a_context_may_be_left_twice_and_after_the_portal() -> None:
    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        yield

    with open_portal() as portal:
        one, other = portal.enter(manager()), portal.enter(manager())
        one.close()
        one.close()
    other.close()


def test_a_context_that_cannot_be_entered_raises() -> None:
    @asynccontextmanager
    async def manager() -> AsyncIterator[None]:
        await _fail()
        yield

    with open_portal() as portal, pytest.raises(ConfigError), portal.enter(manager()):
        pytest.fail("must not be entered")


def test_a_closed_portal_says_so_to_who_waits_and_to_who_comes() -> None:
    with open_portal() as portal:
        waits = trio.Event()
        started = threading.Event()

        async def wait() -> None:
            started.set()
            await waits.wait()

        errors: list[BaseException] = []

        def ask() -> None:
            try:
                portal.call(wait)
            except SessionClosed as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert started.wait(10)
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(SessionClosed):
        portal.call(wait)


def test_ctrl_c_cancels_the_call_and_the_portal_goes_on() -> None:
    # os.write: two threads speak, and print writes a line in two pieces.
    program = """
import os, trio
from llmnode.client.portal import open_portal
def say(line):
    os.write(1, f"{line}\\n".encode())
async def wait():
    try:
        say("waiting")
        await trio.sleep_forever()
    finally:
        say("cancelled")
async def three():
    return 3
with open_portal() as portal:
    try:
        portal.call(wait)
    except KeyboardInterrupt:
        say(f"interrupted {portal.call(three)}")
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert sorted(rest.splitlines()) == ["cancelled", "interrupted 3"]
    assert process.returncode == 0


def test_a_forked_process_is_told_that_the_loop_is_not_there_and_may_leave() -> None:
    program = """
import os, signal
from contextlib import asynccontextmanager
from llmnode.client.portal import open_portal
from llmnode.errors import ConfigError
@asynccontextmanager
async def manager():
    yield
async def three():
    return 3
with open_portal() as portal, portal.enter(manager()):
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), portal.call(three))
    else:
        signal.alarm(10)
        try:
            portal.call(three)
        except ConfigError as error:
            assert "forked" in str(error)
"""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout == "0 3\n"


def test_a_stream_gives_what_comes_and_then_the_error() -> None:
    came: list[int] = []

    async def count(give: Callable[[int], None]) -> None:
        for number in range(3):
            give(number)
            await trio.lowlevel.checkpoint()
        raise ValueError("no")

    with open_portal() as portal, pytest.raises(ValueError, match="no"):
        came.extend(portal.stream(count))
    assert came == [0, 1, 2]


def test_who_leaves_a_stream_ends_what_gives() -> None:
    ended = threading.Event()

    async def endless(give: Callable[[int], None]) -> None:
        try:
            while True:
                give(1)
                await trio.lowlevel.checkpoint()
        finally:
            ended.set()

    with open_portal() as portal:
        stream = portal.stream(endless)
        assert next(stream) == 1
        stream.close()  # type: ignore[attr-defined]  # a generator
        assert ended.is_set()


def test_a_portal_that_closes_ends_a_stream() -> None:
    async def wait(give: Callable[[int], None]) -> None:
        give(1)
        await trio.sleep_forever()

    portal = open_portal()
    stream = portal.stream(wait)
    assert next(stream) == 1
    portal.close()
    with pytest.raises(SessionClosed):
        next(stream)
