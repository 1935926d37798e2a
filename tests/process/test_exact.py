"""Through any number of servers, with any cut, the tokens are those of transformers in one process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.client.connect import Client

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()
NEW_TOKENS = 64
NEAR_TIE_LIMIT = 0.001
"""At most this share of positions may be decided otherwise where transformers' own top two are a near tie."""
AT_ONCE = 20


@pytest.fixture(scope="module")
def prompts(folder: Any) -> list[list[int]]:
    parts = load_parts(folder)
    assert len(PROMPTS) == 20
    return [parts.tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def epsilon(transformers_model: Any, prompts: list[list[int]]) -> float:
    """4 x the largest deviation of a score between one forward over all positions and one a position."""
    sequence = torch.tensor([prompts[0] + _generate(transformers_model, prompts[0])])
    with torch.inference_mode():
        whole = transformers_model(sequence).logits[0]
        cache = None
        deviation = 0.0
        for position in range(sequence.shape[1]):
            output = transformers_model(sequence[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            deviation = max(deviation, (output.logits[0, 0] - whole[position]).abs().max().item())
    assert 0 < deviation < 0.01
    return 4 * deviation


@pytest.mark.parametrize(
    "edges",
    [(0, 30), (0, 7, 30), (0, 14, 19, 30), (0, 3, 11, 12, 25, 30)],
    ids=["1 server", "2 servers", "3 servers", "5 servers"],
)
def test_greedy_tokens_are_those_of_transformers(
    edges: tuple[int, ...],
    start_servers: Callable[..., list[Any]],
    transformers_model: Any,
    prompts: list[list[int]],
    epsilon: float,
    record_property: Callable[[str, object], None],
) -> None:
    nodes = start_servers([Span(start, end) for start, end in pairwise(edges)])
    try:
        chosen = trio.run(_generate_all, [node.address for node in nodes], prompts)
    finally:
        for node in nodes:
            node.stop()
    near_ties = sum(
        _count_near_ties(transformers_model, prompt, tokens, epsilon)
        for prompt, tokens in zip(prompts, chosen, strict=True)
    )
    record_property("near_ties", near_ties)
    assert near_ties <= NEAR_TIE_LIMIT * NEW_TOKENS * len(prompts)


async def _generate_all(addresses: Sequence[str], prompts: Sequence[list[int]]) -> list[list[int]]:
    """All prompts, several sessions at once: each must be exact whatever runs beside it."""
    chosen: dict[int, list[int]] = {}
    went_direct = 0
    at_once = trio.CapacityLimiter(AT_ONCE)

    async def generate_one(client: Client, index: int) -> None:
        nonlocal went_direct
        async with at_once:
            generation = await client.generate(prompts[index], NEW_TOKENS, stop_at_eos=False)
            chosen[index] = list(generation.token_ids)
            went_direct += all(hop.direct for hop in generation.timings[-1].hops[1:])

    async with aconnect(addresses) as client:
        assert len(client.route) == len(addresses)
        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(generate_one, client, index)
    assert went_direct > len(prompts) / 2, "servers that have just started hear of each other while the first ones run"
    return [chosen[index] for index in range(len(prompts))]


@torch.inference_mode()
def _generate(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=None,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]


@torch.inference_mode()
def _count_near_ties(model: Any, prompt: list[int], tokens: list[int], epsilon: float) -> int:
    """Positions at which transformers, given the tokens before, takes another: each must be a near tie to it.

    No such position means that it generates these very tokens.
    """
    scores = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    ties = 0
    for position, (row, token) in enumerate(zip(scores, tokens, strict=True)):
        if int(row.argmax()) != token:
            first, second = row.topk(2).values
            assert first - second < epsilon, f"token {position} differs, and not by a near tie"
            ties += 1
    return ties
