"""The servers of `churn`: real processes with an identity each, that are started, killed and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from bench.churn.slowed import VARIABLE
from bench.kit.child import as_program
from llmnode.core.ids import PeerId
from llmnode.core.peers.whereabouts import peer_of
from llmnode.node.processes import ServerDied
from llmnode.node.settings import without_settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PORT_LOOPBACK = "/ip4/127.0.0.1/tcp/0"
MOVING, STAYING, SERVES = "moving from blocks", "staying with blocks", "the worker serves blocks"
KV_TOKENS = 2048


@dataclass(slots=True)
class Server:
    """One of the fleet. Its lives have one identity."""

    name: str
    blocks: int
    slower_us: int
    identity: Path
    address: str = ""
    process: trio.Process | None = None
    ready: trio.Event = field(default_factory=trio.Event)
    lines: list[tuple[float, str]] = field(default_factory=list)
    """All that it has said, with times."""
    last_words: list[str] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return peer_of(self.address)

    @property
    def lives(self) -> bool:
        """It is ready, and not killed."""
        return self.process is not None and self.process.poll() is None and self.ready.is_set()

    def count(self, what: str) -> int:
        return sum(line.startswith(what) for _, line in self.lines)


async def start(server: Server, peers: Sequence[str], nursery: trio.Nursery) -> None:
    """Begin a life. Its `ready` is set once it serves."""
    server.ready = trio.Event()
    command = [sys.executable, "-P", *as_program("bench.churn.slowed"), "serve", "--json", "--until-stdin-closes"]
    command += ["--blocks", str(server.blocks), "--threads", "1", "--worker", "thread", "--listen", PORT_LOOPBACK]
    command += ["--kv-tokens", str(KV_TOKENS), "--identity", str(server.identity), "--drain-s", "0"]
    server.process = await trio.lowlevel.open_process(
        [*command, *(["--peers", *peers] if peers else [])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**without_settings(os.environ), VARIABLE: str(server.slower_us)},
        start_new_session=True,  # a Ctrl-C in the terminal is ours alone
    )  # fmt: skip
    nursery.start_soon(_watch, server, server.process)
    nursery.start_soon(_collect_errors, server, server.process)


async def kill(server: Server) -> None:
    """The effect of a power cut."""
    assert server.process is not None
    server.process.kill()
    await server.process.wait()


async def end_all(servers: Sequence[Server]) -> None:
    """None of them is left."""
    with trio.CancelScope(shield=True):
        for server in servers:
            if server.process is not None and server.process.poll() is None:
                await kill(server)


async def until_ready(servers: Sequence[Server]) -> None:
    """Raises ServerDied with the last words of one that ended."""
    for server in servers:
        await server.ready.wait()
        if server.process is not None and server.process.poll() is not None:
            raise ServerDied(f"{server.name} ended: {' '.join(server.last_words[-3:])}")


async def _watch(server: Server, process: trio.Process) -> None:
    assert process.stdout is not None
    rest = b""
    async with process.stdout as stdout:
        async for chunk in stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event: dict[str, Any] = json.loads(line)  # Any: JSON
                if event["event"] == "ready":
                    server.address = event["addresses"][0]
                    server.ready.set()
                elif "text" in event:
                    server.lines.append((trio.current_time(), event["text"]))
    await process.wait()
    server.ready.set()


async def _collect_errors(server: Server, process: trio.Process) -> None:
    assert process.stderr is not None
    rest = b""
    async with process.stderr as stderr:
        async for chunk in stderr:
            *lines, rest = (rest + chunk).split(b"\n")
            server.last_words += [line.decode(errors="replace") for line in lines if line.strip()]
            del server.last_words[:-40]
