"""Real nodes on loopback, started as a user would start them, and what transformers says of the same model."""

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
import torch

from llmnode.core.span import Span
from llmnode.node.settings import without_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.ready = event
                return
        pytest.fail(f"the server ended: {self.process.stderr.read() if self.process.stderr else ''}")

    def stop(self) -> None:
        """As a parent that goes away does."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=STOP_S)


@pytest.fixture(scope="module", autouse=True)
def no_settings() -> Iterator[None]:
    """Children are told all on their command line, whatever the developer has set for their own commands."""
    with patch.dict(os.environ, without_settings(os.environ), clear=True):
        yield


@pytest.fixture(scope="module")
def start_servers() -> Iterator[Callable[..., list[Node]]]:
    """Start a server for each span, and wait until all are ready; they are stopped after the module's tests."""
    started: list[Node] = []

    def start(
        spans: Sequence[Span], *, threads: int = 1, peers: Sequence[str] = (), more: Sequence[str] = ()
    ) -> list[Node]:
        options = ["--threads", str(threads), *(["--peers", *peers] if peers else []), *more]
        nodes = [
            Node(
                subprocess.Popen(
                    [*SERVE, "--blocks", f"{span.start}:{span.end}", *options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
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


@pytest.fixture(scope="session")
def folder() -> Any:  # Any: torch and transformers are imported by what asks for it
    from llmnode.models.embedded import open_embedded

    return open_embedded()


@pytest.fixture(scope="session")
def transformers_model(folder: Any) -> Any:
    """The whole model in this process, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder.path, local_files_only=True).eval()
