"""Servers as child processes on this machine: a private swarm for the demo, the benchmarks and the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import trio

from llmnode.core.span import Span
from llmnode.errors import LlmnodeError
from llmnode.node.introspect import SIGNAL
from llmnode.node.settings import without_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

START_TIMEOUT_S = 300.0
"""The first start on a machine converts the model."""
STOP_TIMEOUT_S = 5.0
READOUT_TIMEOUT_S = 30.0
"""A busy machine, and no more."""
_KEPT_LINES = 40
STARTING, READY, ENDED = "starting", "ready", "ended"
LLMNODE = ("-m", "llmnode.node")


class ServerDied(LlmnodeError):
    """A server process of ours ended before it was told to."""


@dataclass(slots=True)
class ServerProcess:
    """A child that serves `span`. `state` is its last word about itself, for people to read."""

    span: Span
    process: trio.Process
    state: str = STARTING
    peer: str = ""
    address: str = ""
    listening: str = ""
    """Where it listens, if it announces another address."""
    tensor_bytes: int = 0
    ready: trio.Event = field(default_factory=trio.Event)
    readout: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    read: trio.Event = field(default_factory=trio.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def pss_mib(self) -> float:
        return sum(pss_mib(each.pid) for each in with_worker(self.pid))

    async def introspect(self) -> dict[str, Any]:  # Any: JSON
        """The things that it has open now: see `introspect.py`. For one task at a time, and a server that is ready."""
        self.read = trio.Event()
        assert SIGNAL is not None
        os.kill(self.pid, SIGNAL)
        with trio.move_on_after(READOUT_TIMEOUT_S):
            await self.read.wait()
            return self.readout
        raise ServerDied(f"the server of blocks {self.span} says nothing: {last_words(self)}")


def with_worker(pid: int) -> list[psutil.Process]:
    """A server's own process, and that of its worker if it has one."""
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def pss_mib(pid: int | None = None) -> float:
    """Proportional set size of a process in MiB: its own memory, and its share of what it shares (Linux).

    Where the system has no PSS, the memory that is the process's alone.
    """
    memory = psutil.Process(pid).memory_full_info()
    return float(getattr(memory, "pss", memory.uss)) / 2**20


@asynccontextmanager
async def private_swarm(
    spans: Sequence[Span],
    *,
    threads: int | None = None,
    announce: Sequence[str] | None = None,
    program: Sequence[str] = LLMNODE,
    model: str | None = None,
    options: Sequence[str] = (),
    on_change: Callable[[Sequence[ServerProcess]], None] = lambda _servers: None,
) -> AsyncIterator[list[ServerProcess]]:
    """One server on loopback per span; yields at once, before they are ready. All are gone when the context ends.

    `announce` has, for each, the address that it tells others. `program` is what Python runs instead of `llmnode`, with
    the same options. `model` is the served model, and `options` are further flags. `on_change` is called whenever the
    state of one changes. Await `all_ready` before using them.
    """
    servers: list[ServerProcess] = []
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        stack.push_async_callback(_stop_all, servers)
        for span, told in zip(spans, announce or [""] * len(spans), strict=True):
            process = await trio.lowlevel.open_process(
                [*_command(program, model, span, threads, told), *options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=without_settings(os.environ),
                start_new_session=True,  # a Ctrl-C in the terminal is ours alone: we end them in order
            )  # fmt: skip
            server = ServerProcess(span, process)
            servers.append(server)
            nursery.start_soon(_watch, server, lambda: on_change(servers))
            nursery.start_soon(_collect_errors, server)
        yield servers


async def all_ready(servers: Sequence[ServerProcess]) -> None:
    """Wait until every server takes sessions. Raises ServerDied with the last words of one that ended."""
    with trio.move_on_after(START_TIMEOUT_S) as patience:
        for server in servers:
            await server.ready.wait()
            if not server.address:
                raise ServerDied(f"the server of blocks {server.span} ended: {last_words(server)}")
    if patience.cancelled_caught:
        raise ServerDied(f"the servers were not ready in {START_TIMEOUT_S:g} s; is the machine overloaded?")


def last_words(server: ServerProcess) -> str:
    return server.last_lines[-1] if server.last_lines else f"exit status {server.process.returncode}, no message"


def _command(program: Sequence[str], model: str | None, span: Span, threads: int | None, announce: str) -> list[str]:
    command = [sys.executable, "-P", *program, "serve", *([model] if model else [])]
    command += ["--blocks", f"{span.start}:{span.end}", "--listen", "/ip4/127.0.0.1/tcp/0"]
    command += ["--announce", announce] if announce else []
    command += ["--threads", str(threads)] if threads else []
    return [*command, "--json", "--until-stdin-closes"]


async def _watch(server: ServerProcess, on_change: Callable[[], None]) -> None:
    """Follow the JSON lines on the child's stdout until it ends."""
    assert server.process.stdout is not None
    rest = b""
    async with server.process.stdout as stdout:
        async for chunk in stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                _note(server, json.loads(line))
                on_change()
    server.state = ENDED
    server.ready.set()
    on_change()


def _note(server: ServerProcess, event: dict[str, Any]) -> None:  # Any: JSON
    if event["event"] == "readout":
        server.readout = event
        server.read.set()
    elif event["event"] == "ready":
        server.state = READY
        server.peer = event["peer"]
        server.address = event["addresses"][0]
        server.listening = event["listening"][0]
        server.tensor_bytes = event["tensor_bytes"]
        server.ready.set()
    elif event["event"] != "figures":
        server.state = event["text"]


async def _collect_errors(server: ServerProcess) -> None:
    assert server.process.stderr is not None
    rest = b""
    async with server.process.stderr as stderr:
        async for chunk in stderr:
            *lines, rest = (rest + chunk).split(b"\n")
            server.last_lines.extend(line.decode(errors="replace") for line in lines if line.strip())


async def _stop_all(servers: Sequence[ServerProcess]) -> None:
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for server in servers:
                nursery.start_soon(_stop, server)


async def _stop(server: ServerProcess) -> None:
    """Ask, wait, kill."""
    process = server.process
    assert process.stdin is not None
    await process.stdin.aclose()
    with trio.move_on_after(STOP_TIMEOUT_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
