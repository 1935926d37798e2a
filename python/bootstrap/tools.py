"""Runs the tools of set-up, each in a process group of its own, which ends with set-up. Their output goes to a log."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootstrap.environment import Setup
from bootstrap.messages import SetupError, explain, say

LOG = "setup.log"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""With all of them the tools end first."""


@dataclass(slots=True)
class Tools:
    """Runs one tool after the other, all output to the log, one line a step to stderr."""

    setup: Setup
    environment: dict[str, str]
    log_fd: int

    def uv(self, step: str, arguments: Sequence[str | Path]) -> None:
        self.run(step, [self.setup.python, "-m", "uv", "pip", "install", "--python", self.setup.python, *arguments])

    def take_indexes_from_pip(self) -> None:
        """uv reads neither pip.conf nor PIP_*; a machine that reaches its packages through them has no other way."""
        command = [str(self.setup.python), "-m", "pip", "config", "list"]
        answer = tool_output(command, self.environment, self.setup.root)
        settings = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", answer.stdout, re.MULTILINE))
        for ours, theirs in (("index-url", "UV_DEFAULT_INDEX"), ("extra-index-url", "UV_INDEX")):
            if settings.get(ours):
                self.environment.setdefault(theirs, settings[ours])

    def run(self, step: str, command: Sequence[str | Path]) -> None:
        words = [str(word) for word in command]
        os.write(self.log_fd, f"\n== {step}: {' '.join(words)}\n".encode())
        start_offset = os.lseek(self.log_fd, 0, os.SEEK_END)
        with progress(step) as tick:
            with running(words, self) as process:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.5)
                    tick()
            if process.returncode != 0:
                log_path = self.setup.venv / LOG
                output = log_path.read_bytes()[start_offset:].decode(errors="replace")
                if shutil.disk_usage(self.setup.venv).free < 2**24:  # a full disk may have kept the tool from saying so
                    output += os.strerror(errno.ENOSPC)
                raise SetupError(f"{step.partition(' (')[0]}: {explain(output)}; details in {log_path}")


@contextlib.contextmanager
def running(words: Sequence[str], tools: Tools) -> Iterator[subprocess.Popen[bytes]]:
    """Its own process group: on Ctrl-C we end it whole, compilers included, and leave nobody writing."""
    came: list[int] = []  # while it was being started, when nobody would know of it
    endings = [each for each in ENDINGS if signal.getsignal(each) is signal.default_int_handler]
    try:
        for ending in endings:
            signal.signal(ending, lambda number, _frame: came.append(number))
        process = subprocess.Popen(
            words,
            cwd=tools.setup.root,
            env=tools.environment,
            stdin=subprocess.DEVNULL,
            stdout=tools.log_fd,
            stderr=tools.log_fd,
            start_new_session=True,
        )
        try:
            raise_interrupts_at(endings)
            if came:
                raise KeyboardInterrupt
            yield process
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    finally:
        raise_interrupts_at(endings)


def raise_interrupts_at(endings: Sequence[signal.Signals]) -> None:
    """KeyboardInterrupt, when such a signal comes."""
    for ending in endings:
        signal.signal(ending, signal.default_int_handler)


def tool_output(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, env=environment, cwd=folder, capture_output=True, text=True)


@contextlib.contextmanager
def progress(step: str) -> Iterator[Callable[[], None]]:
    """One line a step: on a terminal with running seconds, else when it begins and when it is done."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()

    def tick() -> None:
        if terminal:
            sys.stderr.write(f"\r\033[Kllmnode: {step} ... {time.monotonic() - started:.0f} s")
            sys.stderr.flush()

    if not terminal:
        say(f"{step} ...")
    tick()
    try:
        yield tick
    finally:
        if terminal:
            sys.stderr.write("\r\033[K")
    say(f"{step}: {time.monotonic() - started:.1f} s")
