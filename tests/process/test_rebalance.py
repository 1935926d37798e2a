"""Three real servers, one of which is killed: another one moves to its blocks, and the tokens stay the same."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import llmnode
from llmnode.errors import LlmnodeError
from process.forked import Forked
from process.other_policies import with_policies
from process.small_server import expected_tokens

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "The capital of France is"
TOKENS = 8
SOON = {"SwarmPolicy.lifetime_s": 15.0, "SwarmPolicy.announce_every_s": 5.0}
"""A killed server is forgotten sooner than usually."""


def started(stack: ExitStack, *peers: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A server of 15 of the 30 blocks, once it is ready."""
    process = Forked(
        [*with_policies(SOON), "serve", "--blocks", "15", "--json", "--threads", "1", "--worker", "thread",
         *(["--peers", *peers] if peers else [])],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.enter_context(process)
    stack.callback(process.kill)
    return process, event(process, "ready")


def event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        said: dict[str, Any] = json.loads(line)
        if said["event"] == name:
            return said
    pytest.fail(f"it ended before it said {name}")


def test_a_server_moves_to_the_blocks_of_one_that_was_killed(transformers_model: Any) -> None:
    with ExitStack() as stack:
        process, ready = started(stack)
        servers = [(process, ready), *(started(stack, ready["addresses"][0]) for _ in range(2))]
        spans = [ready["blocks"] for _, ready in servers]
        assert sorted(map(tuple, spans[:2])) == [(0, 15), (15, 30)]
        # The third one joined the slower of the two, and one is alone. Either of the others may move then.
        alone = spans.index(next(span for span in spans if spans.count(span) == 1))
        with llmnode.connect(peers=[ready["addresses"][0] for _, ready in servers]) as model:
            prompt = model.tokenizer.encode(PROMPT)
            servers[alone][0].kill()
            deadline_s = time.monotonic() + 200.0
            while True:
                try:
                    ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
                    break
                except LlmnodeError:
                    assert time.monotonic() < deadline_s
        assert ids[0].tolist() == [*prompt, *expected_tokens(transformers_model, prompt, TOKENS)]
