"""A server that is told to stop while it serves a session: no error, and the tokens of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import llmnode
from bench.hostile.attacks import Order
from llmnode.core.span import Span
from process.forked import Forked
from process.small_server import expected_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"
HALF = 10
ENDS_WITHIN_S = 10.0


class Draining:
    """`llmnode serve`, and what it says to its operator."""

    def __init__(self, blocks: str, drain_s: float, *peers: str) -> None:
        options = ["--peers", *peers] if peers else []
        self.process = Forked(
            [sys.executable, "-P", "-m", "llmnode.node", "serve", "--blocks", blocks, "--json", "--threads", "1",
             "--drain-s", str(drain_s), *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        pytest.fail(f"it ended: {self.process.stderr.read() if self.process.stderr else ''}")

    def end(self) -> str:
        """Returns what it said on stderr."""
        _, said = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return said


@pytest.fixture
def start_draining() -> Iterator[Callable[..., Draining]]:
    with ExitStack() as stack:

        def start(*arguments: Any) -> Draining:
            server = Draining(*arguments)
            stack.callback(server.process.kill)
            return server

        yield start


@pytest.fixture(scope="module")
def first(start_servers: Callable[..., list[Any]]) -> Any:
    return start_servers([Span(0, 15)])[0]


def test_a_session_does_not_notice_that_its_server_was_told_to_stop(
    first: Any,
    start_servers: Callable[..., list[Any]],
    start_draining: Callable[..., Draining],
    transformers_model: Any,
) -> None:
    stopping = start_draining("15:30", 1.0, first.address)
    stopping.wait_for("ready")
    with llmnode.connect(peers=[first.address]) as model:
        prompt = model.tokenizer.encode(PROMPT)
        ids = torch.tensor([prompt])
        with model.open_cache(64) as cache:
            options: dict[str, Any] = {"cache": cache, "do_sample": False, "pad_token_id": 0}
            ids = model.generate(ids, max_new_tokens=HALF, **options)
            (late,) = start_servers([Span(15, 30)], peers=[first.address])
            stopping.process.send_signal(signal.SIGTERM)
            assert stopping.wait_for("draining")["sessions"] == 1
            ids = model.generate(ids, max_new_tokens=HALF // 2, **options)
            said = stopping.end()
            ids = model.generate(ids, max_new_tokens=HALF // 2, **options)
            (session,) = cache._sessions
            assert session.route[-1].peer == late.ready["peer"]
    late.stop()
    assert ids[0].tolist() == [*prompt, *expected_tokens(transformers_model, prompt, 2 * HALF)]
    assert "draining: 1 session left" in said
    assert "Traceback" not in said


@contextmanager
def attacked(address: str) -> Iterator[None]:
    """Peers that open sessions again and again, leave frames unfinished, read nothing, and say nothing."""
    order = Order(["hog", "unfinished", "unread", "silent"], 16, [address], [(15, 30)], [])
    command = [sys.executable, "-P", "-m", "bench.hostile.attacks", order.packed()]
    folders = [Path(llmnode.__file__).parents[1], Path(__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    with Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield
        finally:
            process.kill()


def test_a_second_signal_ends_a_draining_server_at_once_whatever_its_peers_do(
    first: Any, start_draining: Callable[..., Draining]
) -> None:
    stopping = start_draining("15:30", 1000.0, first.address)
    address = stopping.wait_for("ready")["addresses"][0]
    with llmnode.connect(peers=[first.address]) as model, model.open_cache(64), attacked(address):
        stopping.process.send_signal(signal.SIGINT)
        stopping.wait_for("draining")
        began_s = time.monotonic()
        stopping.process.send_signal(signal.SIGINT)
        stopping.end()
        assert time.monotonic() - began_s < ENDS_WITHIN_S


def test_how_long_a_server_drains_must_be_a_time() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "llmnode.node", "serve", "--drain-s", "-1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--drain-s -1" in done.stderr
