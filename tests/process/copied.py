"""The process that is copied for each program that `forked.py` starts: `python -m process.copied SOCKET`.

A copy of a server is two processes. The second one waits until the server starts its worker, and becomes that worker.
Beside a copy of a program that starts servers there is a process of its own that is copied for each of them.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llmnode.models.sources.online import keep_libraries_offline
from netns.internet import enter
from process.forked import DONE, MESSAGE_BYTES, TEMPLATE, Forked, copied_over

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMPORTED = (
    "llmnode.node.cli",
    "llmnode.node.app",
    "llmnode.client.connect",
    "llmnode.client.causal_lm",
    "llmnode.client.model",
    "llmnode.models.load",
    "transformers.models.llama.modeling_llama",
)
WORKER = ["-m", "llmnode.compute.child"]
WITH_SERVERS = {"demo", "bench"}
"""Programs that start servers."""
NAME = Path("/proc/self/comm")
FILES_MAX = 16
ABOVE_ALL = 200
"""Numbers of files that no program asks for."""


class Request:
    """A program, and the files that it has."""

    def __init__(self, said: Mapping[str, Any], files: Sequence[int]) -> None:  # Any: JSON
        self.arguments: list[str] = said["arguments"]
        self._environment: dict[str, str] = said["environment"]
        self._folder: str = said["folder"]
        self._new_session: bool = said["new_session"]
        self._namespace: str = said["namespace"]
        self._numbers: list[int] = said["numbers"]
        self._files = files

    @property
    def has_worker(self) -> bool:
        """Whether it may start a worker: a server that nobody has told to have it in a thread."""
        return "serve" in self.arguments and "thread" not in self.arguments

    @property
    def has_servers(self) -> bool:
        return not WITH_SERVERS.isdisjoint(self.arguments)

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def enter_namespace(self) -> None:
        """Moves this process into its network namespace, if it has one."""
        if self._namespace:
            with open(Path("/run/netns", self._namespace)) as namespace:
                enter(namespace.fileno())

    def become(self) -> None:
        """Runs the program in this process."""
        os.chdir(self._folder)
        if self._new_session:
            os.setsid()
        above = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE_ALL) for file in self._files]
        self.close()
        for file, number in zip(above, self._numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(self._environment)
        tempfile.tempdir = None  # which an import may have asked for, in the former environment
        if self._environment.get("PYTHONFAULTHANDLER"):  # which Python reads when it starts
            faulthandler.enable()
        if threads := self._environment.get("OMP_NUM_THREADS"):  # which was read when torch was imported
            import_module("torch").set_num_threads(int(threads))
        kind, *rest = self.arguments
        sys.argv = rest if kind == "-m" else self.arguments
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            code, *sys.argv[1:] = rest
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(kind, run_name="__main__")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    request = next_copy(connection)
    request.enter_namespace()
    if request.has_servers:
        request = with_servers(request)
    if request.has_worker:
        request = with_worker(request)
    request.become()
    # The command line ends like this, too: torch would take a second.
    sys.stdout.flush()
    os._exit(0)


def import_all() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # or numpy begins with a thread, and threads are not copied
    # Libraries read these when they are imported. The command line sets them before, in `settle_libraries`.
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", TQDM_DISABLE="1")
    os.environ.update(HF_HUB_VERBOSITY="error", TRANSFORMERS_VERBOSITY="error")
    keep_libraries_offline()
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # or a collection in a copy would write to all that was imported


def next_copy(connection: socket.socket) -> Request:
    """Returns in each copy. A process between the two ends at once, so that the copy is adopted: see `forked.py`."""
    while request := receive(connection):
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads are not copied"
        if os.fork() == 0:
            if (pid := os.fork()) == 0:
                connection.close()
                return request
            connection.send(str(pid).encode())
            os._exit(0)
        os.wait()
        request.close()
        connection.send(DONE)
    os._exit(0)


def receive(connection: socket.socket) -> Request | None:
    said, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, FILES_MAX)
    return Request(json.loads(said), files) if said else None


def with_servers(program: Request) -> Request:
    """Returns in a program's process, and in that of each server that it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        program.close()
        NAME.write_text(TEMPLATE)
        server = next_copy(theirs)
        NAME.write_text("python")
        return server
    theirs.close()
    one_copy = threading.Lock()

    def start(request: Mapping[str, Any], files: Sequence[int]) -> int:
        with one_copy:
            return copied_over(ours, request, files)

    Forked.copy = staticmethod(start)
    subprocess.Popen = Forked  # type: ignore[misc] # which trio calls
    return program


def with_worker(server: Request) -> Request:
    """Returns in a server's process, and in that of its worker once that is started. Another worker starts as usual."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = os.fork()
    if waiting == 0:
        ours.close()
        server.close()
        worker = receive(theirs)
        if worker is None:  # the server has ended
            os._exit(0)
        theirs.close()
        return worker
    theirs.close()
    started: list[int] = []

    def start(request: Mapping[str, Any], files: Sequence[int]) -> int | None:
        if started or request["arguments"][:2] != WORKER:
            return None
        started.append(waiting)
        socket.send_fds(ours, [json.dumps(request).encode()], files)
        ours.close()
        return waiting

    Forked.copy = staticmethod(start)
    subprocess.Popen = Forked  # type: ignore[misc] # which trio calls
    return server


if __name__ == "__main__":
    main()
