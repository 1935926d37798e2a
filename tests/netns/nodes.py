"""Processes of llmnode at places of an internet, and the traffic between them while they generate."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import pytest

from process.forked import Forked
from process.other_policies import with_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netns.internet import Internet, Place

LLMNODE = [sys.executable, "-P", "-m", "llmnode.node"]
GIVES_UP_SOONER = with_policies({"ReachPolicy.dial_s": 2.0})
"""`llmnode` that dials back for 2 s, not 5. To the dials of strangers a NAT answers nothing."""
CLIENT = [sys.executable, "-P", str(Path(__file__).with_name("client.py"))]
PORT = 4001
PROMPT = "The first ten prime numbers are"
NEW_TOKENS = 16
MANY_TOKENS = 64
"""There is a long way to go after the events of the beginning."""
IN_MID_SESSION = 4
"""An event in mid-session happens after this number of tokens."""
STOP_S = 60
"""The time for a process to end, torch and all, on a busy machine."""
HIDDEN_BYTES = 576 * 4
"""The hidden state of one position."""


class Child:
    """A process at a place. It talks in lines of JSON."""

    def __init__(self, place: Place, *command: str, popen: type[subprocess.Popen[str]] = Forked) -> None:
        """`popen` starts it. By default its imports are done: see `process/forked.py`."""
        self.place = place
        self._stderr = TemporaryFile("w+")  # noqa: SIM115 - for as long as the process
        self.process = popen(
            place.command(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # Processes share the machine's cores. A process that has to be aborted prints its stack.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,  # a Ctrl-C in the terminal reaches only pytest
        )

    @functools.cached_property
    def ready(self) -> dict[str, Any]:  # Any: JSON
        return self.wait("ready")

    @property
    def address(self) -> str:
        address: str = self.ready["addresses"][0]
        return address

    @property
    def peer(self) -> str:
        peer: str = self.ready["peer"]
        return peer

    def wait(self, event: str) -> dict[str, Any]:
        """Its next line of this event. Other lines before it are skipped."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["event"] == event:
                return said
            assert said["event"] != "failed", said["error"]
        pytest.fail(f"the process in {self.place.name} ended: {self._said()}")

    def tell(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Close its stdin, as the end of a parent does. If it does not end, it is aborted, and the test fails."""
        try:
            self.process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.communicate(timeout=STOP_S)
            pytest.fail(f"the process in {self.place.name} did not end in {STOP_S} s: {self._said()}")
        finally:
            self.process.kill()
            self.process.communicate()
            self._stderr.close()

    def _said(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-3000:]


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Start processes in places: `start(place, *command)`, as a `Child` does. All have ended when the context ends."""
    started: list[Child] = []

    def start(place: Place, *command: str, popen: type[subprocess.Popen[str]] = Forked) -> Child:
        started.append(Child(place, *command, popen=popen))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            assert child.process.stdin is not None
            child.process.stdin.close()  # of all of them, before waiting for one
            child.process.stdin = None
        for child in started:
            child.stop()


def relay_command(place: Place) -> list[str]:
    return [*GIVES_UP_SOONER, "relay", "--json", "--until-stdin-closes", "--listen", f"/ip4/{place.inside}/tcp/{PORT}"]


def serve_command(place: Place, blocks: str, *options: str) -> list[str]:
    command = [*GIVES_UP_SOONER, "serve", "--json", "--until-stdin-closes", "--threads", "1", "--blocks", blocks]
    return [*command, "--listen", f"/ip4/{place.inside}/tcp/{PORT}", *options]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the tokens that transformers generates after it, as ids."""

    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True, slots=True)
class Session:
    """One generation that has ended and was exact, and the bytes between places meanwhile."""

    prompt_tokens: int
    recoveries: Sequence[dict[str, Any]]
    pushed: bool
    """Whether in some steps servers gave their results to each other and not to the client."""
    carried: Counter[tuple[str, str]]

    def went_straight(self, source: Place, target: Place) -> bool:
        """Whether this way has carried more bytes than the prompt's hidden states have."""
        return self.carried[source.name, target.name] > self.prompt_tokens * HIDDEN_BYTES


@dataclass(frozen=True, slots=True)
class Crossing:
    """The conditions and the results of one session, for the table."""

    scenario: str
    client: str
    servers: str
    to_servers: str
    between_servers: str
    recoveries: str


def crossing(
    scenario: str,
    session: Session,
    client: Place,
    first: Place,
    others: Sequence[Place],
    relays: Sequence[Place] = (),
) -> Crossing:
    """The row of a session with its first hop at `first`, the next at one of `others`, and the present kinds of NAT."""
    return Crossing(
        scenario,
        kind_of(client),
        kind_of(first),
        way(session, client, [first], relays),
        way(session, first, others, relays) if session.pushed else "through the client",
        str(len(session.recoveries)),
    )


def way(session: Session, source: Place, targets: Sequence[Place], relays: Sequence[Place]) -> str:
    relayed, direct = [any(session.went_straight(source, each) for each in places) for places in (relays, targets)]
    return "relayed, then direct" if relayed and direct else "direct" if direct else "relayed"


def kind_of(place: Place) -> str:
    return str(place.nat.kind) if place.nat else "public"


class Client:
    """The process of `client.py` at its place."""

    def __init__(self, child: Child, internet: Internet) -> None:
        self.child = child
        self._internet = internet

    @property
    def place(self) -> Place:
        return self.child.place

    def generate(
        self,
        peers: Sequence[str],
        question: Question,
        new_tokens: int = NEW_TOKENS,
        *,
        after: int = 0,
        do: Callable[[list[str]], None] = lambda _peers: None,
    ) -> Session:
        """Generate; the text must be exact. `do` is called after `after` tokens, with the peers of the hops."""
        before = self._internet.carried.copy()
        self.child.tell({"peers": list(peers), "prompt": question.prompt, "new_tokens": new_tokens})
        hops = self.child.wait("opened")["peers"]
        for _ in range(after):
            self.child.wait("token")
        do(hops)
        done = self.child.wait("done")
        assert done["token_ids"] == question.expected[:new_tokens]
        carried = self._internet.carried.copy()
        carried.subtract(before)
        return Session(len(question.prompt), done["recoveries"], done["pushed"], carried)
