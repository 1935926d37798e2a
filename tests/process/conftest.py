"""Real nodes on loopback, started as a user would start them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

import llmnode
from llmnode.core.span import Span
from llmnode.node.settings import without_settings
from process.forked import Forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from process.strangers import Served

SERVE = [sys.executable, "-P", "-m", "llmnode.node", "serve", "--json", "--until-stdin-closes"]
STOP_S = 20


@dataclass
class Node:
    """A running `llmnode serve`; `ready` is its readiness object."""

    process: subprocess.Popen[str]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        address: str = self.ready["addresses"][0]
        return address

    def wait_ready(self) -> None:
        self.ready = self.next_event("ready")

    def next_event(self, name: str) -> dict[str, Any]:
        """Waits for the program's event of this name."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event.pop("event") == name:
                return event
        pytest.fail(f"the server ended: {self.process.stderr.read() if self.process.stderr else ''}")

    def stop(self) -> None:
        """Closes the program's stdin, as a parent that goes away does."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=STOP_S)


@pytest.fixture(scope="module", autouse=True)
def no_settings() -> Iterator[None]:
    """Children are told all on their command line, whatever the developer has set for their own commands."""
    with patch.dict(os.environ, without_settings(os.environ), clear=True):
        yield


@contextlib.contextmanager
def serving(popen: type[subprocess.Popen[str]]) -> Iterator[Callable[..., list[Node]]]:
    """To start a server for each span, and wait until all are ready; they are stopped when the context ends."""
    started: list[Node] = []

    def start(
        spans: Sequence[Span], *, threads: int = 1, peers: Sequence[str] = (), more: Sequence[str] = ()
    ) -> list[Node]:
        options = ["--threads", str(threads), *(["--peers", *peers] if peers else []), *more]
        nodes = [
            Node(
                popen(
                    [*SERVE, "--blocks", f"{span.start}:{span.end}", *options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=without_settings(os.environ),
                )
            )
            for span in spans
        ]
        started.extend(nodes)
        for node in nodes:
            node.wait_ready()
        return nodes

    yield start
    for node in started:
        node.stop()


@pytest.fixture(scope="module")
def start_servers() -> Iterator[Callable[..., list[Node]]]:
    """Starts servers for one module. Their imports are done: see `forked.py`."""
    with serving(Forked) as start:
        yield start


@pytest.fixture(scope="module")
def start_as_users_do() -> Iterator[Callable[..., list[Node]]]:
    """Starts servers for one module, each of which imports all that it needs."""
    with serving(subprocess.Popen) as start:
        yield start


@pytest.fixture(scope="session")
def nodes() -> Iterator[list[Node]]:
    """Two unequal servers, the second of which knows the first, for all tests that leave them as they were."""
    with serving(subprocess.Popen) as start:
        (first,) = start([Span(0, 12)])
        yield [first, *start([Span(12, 30)], peers=[first.address])]


@pytest.fixture(scope="session")
def peers(nodes: list[Node]) -> list[str]:
    return [node.address for node in nodes]


@pytest.fixture(scope="module")
def model(peers: list[str]) -> Iterator[llmnode.DistributedModelForCausalLM]:
    with llmnode.connect(peers=peers) as connected:
        yield connected


@pytest.fixture(scope="session")
def tokenizer(folder: Any) -> Any:
    """The tokenizer that transformers loads, for batches."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder.path, padding_side="left")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a small model, which strangers attack, for all tests that leave it as it was."""
    from process.strangers import serve_to_strangers

    folder, errors = tmp_path_factory.mktemp("model") / "small", tmp_path_factory.mktemp("said") / "stderr"
    with serve_to_strangers(folder, errors) as served:
        yield served
