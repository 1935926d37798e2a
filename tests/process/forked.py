"""Programs that begin with their imports done: copies of a process that has imported what all of them need.

The imports of a server take 3 s, and those of a client 6 s. Tests of how a program starts, of signals, of memory and of
how a process ends start it as a user does. `copied.py` is the program of the process that is copied.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PYTHON = [sys.executable, "-P"]
TEMPLATE = "template"
"""The name of a process that is copied, as the system has it, where a program has one of its own."""
IN_NAMESPACE = ["ip", "netns", "exec"]
"""A command of `tests/netns` begins with this, and the name of a namespace."""
MESSAGE_BYTES = 1 << 17
DONE = b"it is yours"
_PR_SET_CHILD_SUBREAPER = 36
_Popen = subprocess.Popen
"""It stays this one where `Forked` has taken its place."""


class Forked(subprocess.Popen[Any]):
    """A Popen of `python -P -m MODULE ...`, `python -P -c CODE ...` or `python -P FILE ...`.

    It is an ordinary one for other programs, and except on Linux. The process is a child of this one, and has the
    environment, the files, the session and the network namespace that it was given.
    """

    copy: ClassVar[Callable[[Mapping[str, Any], Sequence[int]], int | None]] = staticmethod(
        lambda request, files: _template().copy(request, files)
    )
    """Returns the id of the child that does a request, with these files. None: it is to be an ordinary one."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:  # Any: see `subprocess`
        execute: Any = super()._execute_child  # type: ignore[misc] # typeshed has what is public
        given = dict(zip(execute.__func__.__code__.co_varnames[2:], others, strict=False))
        ends = [given[end] for end in ("p2cread", "c2pwrite", "errwrite")]
        numbers = [0, 1, 2, *given["pass_fds"]]
        place, command = _split_namespace(list(args))
        request = {
            "arguments": command[len(PYTHON) :],
            "namespace": place,
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "folder": given["cwd"] or os.getcwd(),
            "new_session": given["start_new_session"],
            "numbers": numbers,
        }
        files = [number if end == -1 else end for number, end in zip(numbers, ends, strict=False)]
        can = sys.platform == "linux" and command[: len(PYTHON)] == PYTHON
        pid = self.copy(request, [*files, *given["pass_fds"]]) if can else None
        if pid is None:
            execute(args, *others)
            return
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[pipe] for pipe in pipes))  # type: ignore[attr-defined] # as above


class CodeForked(Forked):
    """A copy if Python is to run code that the command has, and an ordinary process otherwise."""

    copy = staticmethod(lambda request, files: Forked.copy(request, files) if request["arguments"][0] == "-c" else None)


def _split_namespace(command: list[str]) -> tuple[str, list[str]]:
    """Returns the name of the network namespace, or "", and the command that runs there."""
    if command[: len(IN_NAMESPACE)] != IN_NAMESPACE:
        return "", command
    return command[len(IN_NAMESPACE)], command[len(IN_NAMESPACE) + 1 :]


def run(command: Sequence[str], timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end, and returns what it has printed."""
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, *printed)


class _Template:
    """The process that is copied. It ends with this one."""

    def __init__(self) -> None:
        self._one_copy = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [*PYTHON, "-m", "process.copied", str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = _Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        atexit.register(self._end)

    def copy(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        with self._one_copy:
            return copied_over(self._connection, request, files)

    def _end(self) -> None:
        self._connection.close()
        self._process.wait()


_template = cache(_Template)


def copied_over(connection: socket.socket, request: Mapping[str, object], files: Sequence[int]) -> int:
    """The id of the copy that the process at the other end makes for a request. It becomes a child of this process."""
    with _adopting():
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        pid = int(connection.recv(MESSAGE_BYTES))
        assert connection.recv(MESSAGE_BYTES) == DONE
    return pid


@contextmanager
def _adopting() -> Iterator[None]:
    """Children whose parent ends become those of this process, if it is the parent of their parent's."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
