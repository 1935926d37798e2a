"""Every family through two processes that hold uneven parts of it: the tokens are those of transformers in one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from llmnode.core.policy import ClientPolicy
from llmnode.models.open_model import open_model
from process.forked import Forked
from process.small_server import ANSWER_S, connected, expected_tokens
from reference.small import BLOCKS, CONFIGS, VOCABULARY, deviation, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.slow]

LENGTHS = (1, 7, 33, 18)
"""Tokens of the prompts that run at once: longer and shorter than a window, and than a chunk."""
NEW_TOKENS = 10
CHUNKED = ClientPolicy(chunk_tokens=13)
STOP_S = 20


@dataclass
class FamilyServer:
    """A running `family_server.py`."""

    process: subprocess.Popen[str]

    def serve(self, folder: Path, start: int, end: int) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"folder": str(folder), "blocks": [start, end]}), file=self.process.stdin, flush=True)

    def address_of(self, folder: Path) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if answer["folder"] == str(folder):  # else that of a test that failed
                return str(answer["address"])
        pytest.fail("the server ended; what it said is above")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FamilyServer]]:
    command = [sys.executable, "-P", str(Path(__file__).parent / "family_server.py")]
    pipe = subprocess.PIPE
    started = [FamilyServer(Forked(command, stdin=pipe, stdout=pipe, text=True)) for _ in range(2)]
    try:
        yield started
        for server in started:
            server.process.communicate(timeout=STOP_S)  # as a parent that goes away
            assert server.process.returncode == 0
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


@pytest.mark.parametrize("case", CONFIGS)
def test_tokens_of_a_family_are_those_of_transformers(case: str, servers: list[FamilyServer], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_model(case, tied=False)
    folder = tmp_path / case
    model.save_pretrained(folder)
    # Each family is cut elsewhere; both parts are never of one size.
    edge = 1 + list(CONFIGS).index(case) % (BLOCKS - 1)
    servers[0].serve(folder, 0, edge)
    servers[1].serve(folder, edge, BLOCKS)
    prompts = _prompts()
    expected = [expected_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS), "what is the same for all proves little"
    addresses = [server.address_of(folder) for server in servers]

    async def generate() -> list[list[int]]:
        with trio.fail_after(ANSWER_S):
            async with connected(addresses, open_model(str(folder)), CHUNKED) as client:
                assert [len(hop.span) for hop in client.route] == [edge, BLOCKS - edge]
                return await client.generate(prompts, NEW_TOKENS)

    chosen = trio.run(generate)
    for prompt, ours, theirs in zip(prompts, chosen, expected, strict=True):
        if ours != theirs:
            _check_near_ties(model, prompt, ours)


def _prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (length,), generator=chance).tolist() for length in LENGTHS]


@torch.inference_mode()
def _check_near_ties(model: Any, prompt: list[int], tokens: list[int]) -> None:  # Any: as transformers types it
    """Teacher-forced: where transformers chooses otherwise, its own top two are a near tie (tests/README.md)."""
    sequence = torch.tensor([prompt + tokens])
    epsilon = 4 * deviation(model, sequence)
    scores = model(sequence).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(scores, tokens, strict=True):
        first, second = row.topk(2).values
        assert int(row.argmax()) == token or first - second < epsilon
