"""Servers of a small model, each a process, that are killed or frozen in the middle of a pass, and that come back.

A strike is a file. The first server of its span that computes such a pass takes the file, and then signals itself.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from process.forked import Forked
from process.other_policies import RUN, with_policies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from llmnode.core.span import Span

START_S = 60.0
"""A server that is to start has not within this time: the test fails."""

STRIKING = """
import os
from llmnode.compute.executor import SpanExecutor

compute = SpanExecutor.run

def run(executor, passes):
    kind = type(passes[0]).__name__
    strike(executor, kind, "before")
    answer = compute(executor, passes)
    strike(executor, kind, "after")
    return answer

def strike(executor, kind, when):
    for name in os.listdir({strikes!r}):
        path = os.path.join({strikes!r}, name)
        if name.startswith(f"{{executor.span.start}} {{kind}} {{when}} "):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue  # the twin has taken it
            os.kill(os.getpid(), int(name.split()[-1]))

SpanExecutor.run = run
"""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of servers of one span, which begins while one of them computes a pass."""

    kind: str
    """`kill`: one is gone until the step is over. `restart`: one dies and comes back while the step goes on. `both`:
    so do both, or one twice. `freeze`: one does nothing until the step is over, and goes on then.
    """
    during: str
    """`Evaluate`, a forward, or `Backward`."""
    when: str
    """`before` it is computed, or `after`, when it has not been answered yet."""
    start: int
    """The first block of the span."""

    @property
    def deaths(self) -> int:
        return {"freeze": 0, "both": 2}.get(self.kind, 1)


def drawn_strikes(seed: int, spans: Sequence[Span]) -> list[Strike]:
    """All kinds of strikes, in forwards and in backwards, in any order."""
    rng = random.Random(seed)
    strikes = [
        Strike(kind, during, rng.choice(("before", "after")), rng.choice(spans).start)
        for kind, during in product(("kill", "restart", "both", "freeze"), ("Evaluate", "Backward"))
    ]
    rng.shuffle(strikes)
    return strikes


class Lives:
    """The lives of one server, in a thread. All have the same identity and address. One begins when the last ends."""

    def __init__(self, span: Span, command: Sequence[str], errors: Path, changed: threading.Condition) -> None:
        """`changed` guards what is said here, and is notified of it."""
        self.span = span
        self.address = ""
        self.peers: Sequence[str] = ()
        """Those that its next life joins."""
        self.is_ready = False
        self.may_begin = True
        self.deaths = 0
        self._command = command
        self._errors = errors
        self._changed = changed
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._live)

    def begin(self) -> None:
        self._thread.start()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def check(self) -> None:
        """Fails if it has not started."""
        assert self._thread.is_alive(), self._errors.read_text()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            if self._process is not None:
                self._process.kill()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _live(self) -> None:
        while self._has_begun():
            assert self._process is not None and self._process.stdout is not None
            for line in self._process.stdout:
                if (event := json.loads(line))["event"] == "ready":
                    with self._changed:
                        self.address, self.is_ready = event["addresses"][0], True
                        self._changed.notify_all()
            self._process.communicate()
            with self._changed:
                could_start, self.is_ready = self.is_ready, False
                self.deaths += 1
                self._changed.notify_all()
            if not could_start:
                return

    def _has_begun(self) -> bool:
        """Waits until the next life may begin. False if there is to be none."""
        listen = ["--listen", self.address.partition("/p2p/")[0]] if self.address else []
        command = [*self._command, *listen, *(["--peers", *self.peers] if self.peers else [])]
        with self._changed:
            self._changed.wait_for(lambda: self.may_begin or self._is_over)
            if self._is_over:
                return False
            with self._errors.open("a") as errors:
                self._process = Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            return True


class StruckServers:
    """Two servers for each span."""

    def __init__(self, servers: Sequence[Lives], strikes: Path, changed: threading.Condition) -> None:
        self._servers = servers
        self._strikes = strikes
        self._changed = changed

    @property
    def addresses(self) -> list[str]:
        return [each.address for each in self._servers]

    def begin(self) -> None:
        first, *others = self._servers
        first.begin()
        self._wait([first])
        for each in others:
            each.peers = [first.address]
            each.begin()
        self._wait(others)
        for each in self._servers:
            each.peers = [other.address for other in self._servers if other is not each]

    @contextmanager
    def under(self, strike: Strike) -> Iterator[None]:
        """Have it befall the servers within this context. Afterwards all are there again."""
        twins = [each for each in self._servers if each.span.start == strike.start]
        number = signal.SIGSTOP if strike.kind == "freeze" else signal.SIGKILL
        deaths = strike.deaths + sum(each.deaths for each in twins)
        for each in twins:
            each.may_begin = strike.kind != "kill"
        files = [
            self._strikes / f"{strike.start} {strike.during} {strike.when} {count} {number:d}"
            for count in range(max(1, strike.deaths))
        ]
        for each in files:
            each.touch()
        try:
            yield
            assert not any(each.exists() for each in files), "nobody was struck"
        finally:
            for each in files:
                each.unlink(missing_ok=True)
            with self._changed:
                for each in twins:
                    each.may_begin = True
                    if number is signal.SIGSTOP:
                        each.send(signal.SIGCONT)
                self._changed.notify_all()
        self._wait(twins, deaths)

    def end(self) -> None:
        for each in self._servers:
            each.end()

    def _wait(self, servers: Sequence[Lives], deaths: int = 0) -> None:
        """Until they are ready, after this number of deaths in all."""

        def is_so() -> bool:
            for each in servers:
                each.check()
            return all(each.is_ready for each in servers) and sum(each.deaths for each in servers) >= deaths

        with self._changed:
            assert self._changed.wait_for(is_so, START_S), "servers do not start"


@contextmanager
def struck_servers(folder: Path, spans: Sequence[Span], place: Path) -> Iterator[StruckServers]:
    """Two servers of the model in `folder` for each of `spans`. `place` is for what they need."""
    strikes, changed = place / "strikes", threading.Condition()
    strikes.mkdir(parents=True)
    program = [*with_policies({}, STRIKING.format(strikes=str(strikes)) + RUN), "serve", str(folder)]
    program += ["--json", "--until-stdin-closes", "--worker", "thread", "--threads", "1", "--kv-tokens", "1000"]
    servers = []
    for index, span in enumerate([*spans, *spans]):
        command = [*program, "--blocks", f"{span.start}:{span.end}", "--identity", str(place / f"{index}.key")]
        servers.append(Lives(span, command, place / f"{index}.stderr", changed))
    struck = StruckServers(servers, strikes, changed)
    try:
        struck.begin()
        yield struck
    finally:
        struck.end()
