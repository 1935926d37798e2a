"""Texts of one client that begin alike: what they share is computed once, and each is what transformers makes of it."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio

import llmnode
from llmnode.client.beginnings import beginnings
from llmnode.client.connect import aconnect
from llmnode.core.span import Span
from process import in_process
from process.described import described, positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

SHARED = (
    "You are a clerk in the town hall, who answers what people ask in a few friendly and simple words. Somebody asks:"
)
QUESTIONS = ["Where is the door?", "Who is the mayor of this town, and since when?", "What is the time?"]
PROMPTS = [f"{SHARED} {question} You answer:" for question in QUESTIONS]
OTHER = "Once upon a time"
NEW_TOKENS = 8


def generated(peers: Sequence[str], prompts: Path, *options: str) -> list[dict[str, Any]]:
    """The JSON that `llmnode generate` prints for each text."""
    command = ["generate", "--json", "--prompts", str(prompts), "--max-new-tokens", str(NEW_TOKENS), *options]
    done = in_process.llmnode(*command, "--peers", *peers)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many all of them begin with."""
    return next(column for column, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)


def greedy(transformers_model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = transformers_model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(output[0, inputs.input_ids.shape[1] :].tolist())
    return texts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join([*PROMPTS, OTHER]))
    return prompts


def test_prompts_of_a_file_that_begin_alike_are_run_from_where_they_part(
    peers: list[str], file: Path, transformers_model: Any, tokenizer: Any
) -> None:
    before = described(peers)
    answers = generated(peers, file)
    after = described(peers)
    texts = [answer["token_ids"] for answer in answers]
    assert texts == greedy(transformers_model, tokenizer, [*PROMPTS, OTHER])
    prompts = [answer["prompt_token_ids"] for answer in answers]
    shared = shared_tokens(prompts[:-1])
    assert shared > 20
    expected = sum(map(len, prompts)) - (len(PROMPTS) - 1) * shared + sum(len(text) - 1 for text in texts)
    assert [now.positions - then.positions for now, then in zip(after, before, strict=True)] == [expected] * 2
    assert [each.kv_tokens_free for each in after] == [each.kv_tokens_free for each in before]


def test_samples_go_on_from_their_prompt_and_that_from_what_prompts_share(peers: list[str], file: Path) -> None:
    before = positions(peers)
    options = ["--samples", "2", "--temperature", "0.9", "--seed", "3"]
    answers = generated(peers, file, *options)
    prompts = [answer["prompt_token_ids"] for answer in answers[::2]]
    own = [len(prompt) - shared_tokens(prompts[:-1]) for prompt in prompts[:-1]]
    runs = shared_tokens(prompts[:-1]) + sum(own) + len(prompts[-1]) + len(PROMPTS) + 1  # each runs the last token
    expected = runs + sum(len(answer["token_ids"]) - 1 for answer in answers)
    assert [now - then for now, then in zip(positions(peers), before, strict=True)] == [expected] * 2
    assert answers == generated(peers, file, *options, "--at-once", "1")


def test_texts_share_nothing_where_no_kv_is_free_for_what_they_share(
    start_servers: Callable[..., list[Any]], tokenizer: Any
) -> None:
    prompts = tokenizer(PROMPTS).input_ids
    shared, (first, second, _) = shared_tokens(prompts), map(len, prompts)
    kv_tokens = first + second + shared - 1
    (server,) = start_servers([Span(0, 30)], more=["--kv-tokens", str(kv_tokens)])

    async def use() -> None:
        async with aconnect([server.address]) as client:
            async with AsyncExitStack() as stack:
                begun = await stack.enter_async_context(beginnings(client, prompts, 1))
                sessions = [
                    await stack.enter_async_context(each.session(len(prompt)))
                    for each, prompt in zip(begun[:2], prompts, strict=False)
                ]
                given_up = "the first one's was given up for the second"
                assert [session.position for session in sessions] == [shared, 0], given_up
            async with (
                client.inference_session(kv_tokens - shared + 1),
                beginnings(client, prompts, 1) as begun,
                begun[0].session(shared - 1) as session,
            ):
                assert session.position == 0, "nothing is shared"

    trio.run(use)


def test_what_a_batch_of_rows_begins_with_is_run_once(
    peers: list[str], transformers_model: Any, tokenizer: Any
) -> None:
    texts = [PROMPTS[0], OTHER, *PROMPTS[1:], PROMPTS[0]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with llmnode.connect(peers=peers) as model:
        before = positions(peers)
        chosen = model.generate(**inputs, **options)
        computed = [now - then for now, then in zip(positions(peers), before, strict=True)]
    assert chosen.tolist() == transformers_model.generate(**inputs, **options).tolist()
    prompts = tokenizer(PROMPTS).input_ids
    once = sum(map(len, prompts)) - (len(PROMPTS) - 1) * shared_tokens(prompts) + len(tokenizer(OTHER).input_ids)
    assert computed == [once + len(texts) * (NEW_TOKENS - 1)] * 2


def test_scores_of_all_positions_are_those_of_rows_that_share_none(
    peers: list[str], transformers_model: Any, tokenizer: Any
) -> None:
    inputs = tokenizer([*PROMPTS, OTHER], return_tensors="pt", padding=True)
    with llmnode.connect(peers=peers) as model:
        scores = model(**inputs).logits
    real = inputs.attention_mask.bool()
    assert (scores[real] - transformers_model(**inputs).logits[real]).abs().max() < 1e-3
