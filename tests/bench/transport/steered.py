"""Peers in processes of their own, which obey orders: for `tests/bench/run transport` and the interop tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from bench.kit.child import TESTS, as_program
from bench.kit.compiled_packages import compiled_packages
from llmnode.errors import ConfigError, LlmnodeError
from llmnode.node.processes import ServerDied

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

ROOT = TESTS.parent
SOURCES = TESTS / "interop"
BUILD_S = 600
"""The first build fetches hundreds of packages."""


class PeerFailed(LlmnodeError):
    """A peer could not obey an order."""


class SteeredPeer:
    """One task at a time gives it orders. Made by `steer`."""

    def __init__(self, process: trio.Process) -> None:
        self.address = ""
        self.peer = ""
        self._process = process
        self._rest = b""

    async def begin(self) -> None:
        """Wait until it listens. Raises ServerDied."""
        ready = await self._answer()
        self.address, self.peer = ready["address"], ready["peer"]

    async def tell(self, do: str, **order: object) -> dict[str, Any]:  # Any: JSON
        """Give an order, and return the answer. Raises PeerFailed, or ServerDied."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps({"do": do, **order}).encode() + b"\n")
        answer = await self._answer()
        if "error" in answer:
            raise PeerFailed(f"{do}: {answer['error']}")
        return answer

    async def _answer(self) -> dict[str, Any]:  # Any: JSON
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            data = await self._process.stdout.receive_some()
            if not data:
                raise ServerDied("a peer of the benchmark ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def python_peer(kind: str) -> list[str]:
    """The command of a peer with the transport `kind`: llmnode, py-libp2p or tcp."""
    return [sys.executable, "-P", *as_program("bench.transport.peers"), kind]


def go_peer(folder: Path) -> list[str]:
    """The command of the go-libp2p peer. It is built into `folder`, in seconds, and in minutes the first time.

    Raises ConfigError without Go, without the source (it is in the repository, not in the package), or if it does not
    build.
    """
    program = folder / "peer"
    _build("go", "https://go.dev/dl", ["build", "-o", str(program), "."])
    return [str(program)]


def rust_peer() -> list[str]:
    """The command of the rust-libp2p peer. It is built in this checkout's target folder, like `go_peer` in seconds, and
    in minutes the first time on a machine. Raises as `go_peer`.
    """
    target = ROOT / "target" / "interop"
    with compiled_packages("interop", target, SOURCES / "rust" / "Cargo.lock", {}):
        _build("cargo", "https://rustup.rs", ["build", "--quiet", "--locked", "--target-dir", str(target)])
    return [str(target / "debug" / "llmnode-interop")]


def _build(tool: str, where_from: str, arguments: Sequence[str]) -> None:
    sources = SOURCES / {"cargo": "rust"}.get(tool, tool)
    if shutil.which(tool) is None:
        raise ConfigError(f"{tool} is not installed, so there is no such peer: see {where_from}")
    if not sources.is_dir():
        raise ConfigError(f"{sources} is not there: run this from a checkout of the repository")
    try:
        built = subprocess.run(
            [tool, *arguments], cwd=sources, capture_output=True, text=True, timeout=BUILD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        again = "what it has fetched stays, so try again"
        raise ConfigError(f"{tool} build in {sources} took longer than {BUILD_S} s: {again}") from error
    if built.returncode:
        why = built.stderr.strip().splitlines() or ["it did not say why"]
        raise ConfigError(f"{tool} build in {sources} failed: {why[-1]}")


@asynccontextmanager
async def steer(command: Sequence[str]) -> AsyncIterator[SteeredPeer]:
    """A listening peer. It ends with the context, or with this process."""
    process = await trio.lowlevel.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal does not reach it
    )
    try:
        peer = SteeredPeer(process)
        await peer.begin()
        yield peer
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()
