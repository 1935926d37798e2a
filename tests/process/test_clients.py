"""Several clients at once, each a process of its own; and what a client leaves behind that is killed or frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.compute.loading import USUAL_KV_TOKENS
from llmnode.core.policy import LinkPolicy
from llmnode.net.host import open_network
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, unpack
from process.forked import Forked
from process.test_exact import NEAR_TIE_LIMIT, PROMPTS, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.kit.exact import Reference

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

CLIENTS = PROMPTS[3:8]
"""The texts have unequal lengths."""
NEW_TOKENS = 40
ANSWER_S = 30.0
GENERATE = [sys.executable, "-P", "-m", "llmnode.node", "generate", "--json"]
ENDLESS = "3000"
"""Tokens; nobody waits for them."""
MARGIN_S = 2.0
"""Beyond the link's silence, for a machine that is busy."""


@pytest.fixture
def start_client(peers: list[str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `llmnode generate` through all servers; none outlives its test."""
    started: list[subprocess.Popen[str]] = []

    def start(prompt: str, new_tokens: int | str) -> subprocess.Popen[str]:
        command = [*GENERATE, "--peers", *peers, "--prompt", prompt, "--max-new-tokens", str(new_tokens)]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # they share the machine's cores
        process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_five_clients_at_once_are_each_exact(
    start_client: Callable[..., subprocess.Popen[str]], reference: Reference
) -> None:
    clients = [start_client(prompt, NEW_TOKENS) for prompt in CLIENTS]
    prompts, chosen = [], []
    for prompt, client in zip(CLIENTS, clients, strict=True):
        out, said = client.communicate()
        assert client.returncode == 0, said
        answer = json.loads(out)
        assert answer["prompt"] == prompt
        prompts.append(answer["prompt_token_ids"])
        chosen.append(answer["token_ids"])
        ended = chosen[-1][-1] in reference.model.generation_config.eos_token_id  # several, as its GGUF file says
        assert len(chosen[-1]) == NEW_TOKENS or ended
    near_ties, wrong = check(reference, prompts, chosen)
    assert wrong == 0
    assert near_ties <= NEAR_TIE_LIMIT * sum(map(len, chosen))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_client_that_vanishes_in_the_middle_leaves_no_kv(
    end: signal.Signals, peers: list[str], start_client: Callable[..., subprocess.Popen[str]]
) -> None:
    """Killed, the system ends its connections; frozen, they stay open, and only its silence tells."""
    full = [USUAL_KV_TOKENS] * len(peers)
    trio.run(_until_free, peers, full)
    client = start_client(PROMPTS[0], ENDLESS)
    assert client.stderr is not None
    shown = client.stderr.read(len(PROMPTS[0]) + 20)  # the prompt, and words that came through the servers
    assert shown.startswith(PROMPTS[0]), shown
    during = trio.run(_kv_tokens_free, peers)
    assert all(free < all_of_it for free, all_of_it in zip(during, full, strict=True))
    os.kill(client.pid, end)
    within_s = trio.run(_until_free, peers, full)
    assert within_s < LinkPolicy().silence_s + MARGIN_S


async def _until_free(peers: Sequence[str], full: list[int]) -> float:
    """How long it took."""
    began = trio.current_time()
    with trio.fail_after(ANSWER_S):
        while await _kv_tokens_free(peers) != full:  # noqa: ASYNC110 - another process has no event for us
            await trio.sleep(0.1)
    return trio.current_time() - began


async def _kv_tokens_free(peers: Sequence[str]) -> list[int]:
    free = []
    async with open_network([], LinkPolicy()) as network:
        for address in peers:
            with trio.fail_after(ANSWER_S):
                link = await network.dial(address)
                await link.send(Frame(FrameType.DESCRIBE))
                while (frame := await link.receive()).type is not FrameType.DESCRIPTION:
                    pass
            free.append(unpack(Description, frame.meta).kv_tokens_free)
    return free
