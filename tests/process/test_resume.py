"""A generation that one process begins and another ends: the tokens of one process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio

import llmnode
from llmnode.client.connect import load_parts
from llmnode.core.span import Span
from process import forked
from process.small_server import expected_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "The capital of France is"
HALF = 10

BEGIN = """
import os, sys
import llmnode, torch
path, *peers = sys.argv[1:]
model = llmnode.connect(peers=peers)
ids = torch.tensor([model.tokenizer.encode({prompt!r})])
cache = model.open_cache(64)
ids = model.generate(ids, cache=cache, do_sample=False, max_new_tokens={half}, pad_token_id=0)
print(cache.export(path, ids[0].tolist()))
sys.stdout.flush()
os._exit(0)  # says goodbye to nobody
"""
GO_ON = """
import sys
import llmnode, torch
with llmnode.resume(sys.argv[1]) as model:
    ids = torch.tensor([model.resumed.token_ids])
    (session,) = model.resumed._sessions
    print(len(session.recoveries))
    ids = model.generate(ids, cache=model.resumed, do_sample=False, max_new_tokens={half}, pad_token_id=0)
    print(ids[0].tolist())
"""


def run(program: str, *arguments: str) -> list[Any]:
    command = [sys.executable, "-P", "-c", program.format(prompt=PROMPT, half=HALF), *arguments]
    done = forked.run(command, timeout_s=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def expected(transformers_model: Any, folder: Any) -> list[int]:
    """All token ids of an undisturbed run in one process, the prompt's too."""
    prompt = load_parts(folder).tokenizer.encode(PROMPT)
    return [*prompt, *expected_tokens(transformers_model, prompt, 2 * HALF)]


def test_another_process_goes_on_where_one_that_died_stood(
    peers: list[str], expected: list[int], tmp_path: Path
) -> None:
    path = str(tmp_path / "session")
    (lease_s,) = run(BEGIN, path, *peers)
    assert lease_s == 60
    recoveries, ids = run(GO_ON, path)
    assert recoveries == 0, "the servers still had the KV"
    assert ids == expected


def test_a_program_goes_on_though_a_server_has_gone(
    start_servers: Callable[..., list[Any]], expected: list[int], tmp_path: Path
) -> None:
    first, dying = start_servers([Span(0, 15), Span(15, 30)])
    path = tmp_path / "session"
    run(BEGIN, str(path), first.address, dying.address)
    dying.process.kill()
    (late,) = start_servers([Span(15, 30)], peers=[first.address])

    async def go_on() -> tuple[int, ...]:
        parts = load_parts()
        async with llmnode.aresume(path, parts=parts) as resumed:
            session = resumed.session
            assert [each.taken_over_by for each in session.recoveries] == [(late.ready["peer"],)]
            generation = await resumed.client.generate(resumed.token_ids, HALF, stop_at_eos=False, session=session)
            return (*resumed.token_ids, *generation.token_ids)

    assert list(trio.run(go_on)) == expected
