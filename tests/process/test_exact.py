"""Through any number of servers, with any cut, the tokens are those of transformers in one process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.kit.exact import Reference
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


@pytest.mark.parametrize(
    ("edges", "every"),
    [((0, 30), 4), ((0, 7, 30), 4), ((0, 14, 19, 30), 1), ((0, 3, 11, 12, 25, 30), 4)],
    ids=["1 server", "2 servers", "3 servers", "5 servers"],
)
def test_greedy_tokens_are_those_of_transformers(
    edges: tuple[int, ...],
    every: int,
    start_servers: Callable[..., list[Any]],
    reference: Reference,
    prompts: list[list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    prompts = prompts[::every]
    nodes = start_servers([Span(start, end) for start, end in pairwise(edges)])
    try:
        chosen = trio.run(_generate_all, [node.address for node in nodes], prompts)
    finally:
        for node in nodes:
            node.stop()
    assert all(len(tokens) == NEW_TOKENS for tokens in chosen)
    near_ties, wrong = check(reference, prompts, chosen)
    record_property("near_ties", near_ties)
    assert wrong == 0
    assert near_ties <= NEAR_TIE_LIMIT * NEW_TOKENS * len(prompts)


def check(reference: Reference, prompts: Sequence[list[int]], chosen: Sequence[list[int]]) -> tuple[int, int]:
    """The tokens that transformers would choose otherwise after each prompt: near ties, and others."""
    judged = [
        reference.judge([*prompt, *tokens], range(len(prompt), len(prompt) + len(tokens)))
        for prompt, tokens in zip(prompts, chosen, strict=True)
    ]
    return sum(ties for ties, _ in judged), sum(wrong for _, wrong in judged)


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
