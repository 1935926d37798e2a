"""Servers that are killed, frozen, cut off and brought back with their identity: two for each span, each a process.

Each is behind a proxy of its own, and announces the proxy's address.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import trio

from bench.failures.cells import SPANS
from bench.failures.starved import SIGNAL
from bench.kit.child import as_program
from bench.kit.proxy import open_proxies
from llmnode.core.ids import PeerId
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.span import split_evenly
from llmnode.node.processes import START_TIMEOUT_S, STOP_TIMEOUT_S, ServerDied
from llmnode.node.settings import without_settings
from llmnode.swarm.membership import wall_clock_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.kit.proxy import Proxies
    from llmnode.core.span import Span

TWINS = 2
LOOPBACK = "127.0.0.1"


class Replica:
    """One server of a span. All its lives have the same peer id and address."""

    def __init__(
        self,
        span: Span,
        identity: Path,
        threads: int,
        proxies: Proxies,
        index: int,
        popen: type[subprocess.Popen[str]] = subprocess.Popen,
    ) -> None:
        """It is behind the proxy of that `index`. `popen` starts its processes."""
        self.span = span
        self.address = ""
        self.since_ms = 0
        """The beginning of its present life. Announcements from before do not hold any more."""
        self._identity = identity
        self._threads = threads
        self._proxies = proxies
        self._index = index
        self._popen = popen
        self._port = _free_port()
        proxies.aim(index, (LOOPBACK, self._port))
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False
        self.is_frozen = False
        self._is_starved = False
        self._is_cut = False

    @property
    def peer(self) -> PeerId:
        return peer_of(self.address)

    @property
    def answers(self) -> bool:
        lives = self._process is not None and self._process.poll() is None and self._is_ready
        return lives and not self.is_frozen and not self._is_cut

    async def start(self, others: Sequence[Replica]) -> None:
        """Wait until it takes sessions. It joins those of `others` that answer. Raises ServerDied."""
        peers = [other.address for other in others if other.answers]
        self.since_ms = wall_clock_ms()
        self._is_ready = False
        await trio.to_thread.run_sync(self._start, peers, abandon_on_cancel=True)
        self._is_ready = True

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self.is_frozen = number == signal.SIGSTOP

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self.is_frozen = self._is_starved = False

    def starve(self) -> None:
        """From now on its blocks have no memory."""
        self.signal(SIGNAL)
        self._is_starved = True

    def cut(self) -> None:
        """Silence all links to it that others have dialled."""
        self._proxies.cut(self._index)
        self._is_cut = True

    def heal(self) -> None:
        """Undo all faults of it, if it lives."""
        if self.is_frozen:
            self.signal(signal.SIGCONT)
        if self._is_starved:
            self.signal(SIGNAL)
            self._is_starved = False
        if self._is_cut:
            self._proxies.heal(self._index)
            self._is_cut = False

    async def end(self) -> int:
        """Wait until it has ended by itself, and kill it if it does not in time. Returns its exit status."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            await trio.to_thread.run_sync(self._process.wait, STOP_TIMEOUT_S)
        self.kill()
        return self._process.returncode

    def _start(self, peers: Sequence[str]) -> None:
        host, port = self._proxies.addresses[self._index]
        command = [
            sys.executable,
            "-P",
            *as_program("bench.failures.starved"),
            "serve",
            "--json",
            "--until-stdin-closes",
        ]
        command += ["--blocks", f"{self.span.start}:{self.span.end}", "--threads", str(self._threads)]
        command += ["--listen", f"/ip4/{LOOPBACK}/tcp/{self._port}"]
        command += ["--announce", f"/ip4/{host}/tcp/{port}"]
        command += ["--worker", "thread"]  # `starved` takes memory away from its own process
        command += ["--drain-s", "0"]  # a server that is told to leave does so in the middle of a session
        command += ["--identity", str(self._identity), *(["--peers", *peers] if peers else [])]
        process = self._process = self._popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=without_settings(os.environ),
            start_new_session=True,  # a Ctrl-C in the terminal does not reach it
        )  # fmt: skip
        assert process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "ready":
                    self.address = event["addresses"][0]
                    return
        finally:
            timer.cancel()
        raise ServerDied(f"the server of blocks {self.span} ended before it was ready")


def _free_port() -> int:
    """A port chosen before the server starts: others may dial a server as soon as it has printed its address."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def replicas(
    blocks: int, threads: int, popen: type[subprocess.Popen[str]] = subprocess.Popen
) -> Iterator[list[Replica]]:
    """Two servers for each of three spans, not started yet. All are dead when the context ends."""
    spans = TWINS * split_evenly(blocks, SPANS)
    with TemporaryDirectory(prefix="llmnode-failures-") as folder, open_proxies(len(spans)) as proxies:
        servers = [
            Replica(span, Path(folder) / f"{index}.key", threads, proxies, index, popen)
            for index, span in enumerate(spans)
        ]
        try:
            yield servers
        finally:
            for server in servers:
                server.kill()


async def start_all(ended: Sequence[Replica], servers: Sequence[Replica]) -> None:
    """Start the servers that have `ended`, all at once. If all `servers` have, the others join the first."""
    if len(ended) == len(servers):
        await ended[0].start([])
        ended = ended[1:]
    async with trio.open_nursery() as nursery:
        for server in ended:
            nursery.start_soon(server.start, servers)
