"""Real servers behind slow lines: all links pack hidden states by themselves, and the tokens are transformers'."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import trio

from bench.kit.shaped import shaped_swarm
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import Span

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

BYTES_PER_S = 2e6
PROMPT_TOKENS = 400
NEW_TOKENS = 4
DEADLINE_S = 240.0


def test_a_swarm_on_slow_lines_packs_by_itself_and_generates_what_transformers_does(transformers_model: Any) -> None:
    parts = load_parts()
    prompt = parts.tokenizer.encode(topics["types"])[:PROMPT_TOKENS]

    async def generate() -> None:
        with trio.fail_after(DEADLINE_S):
            async with shaped_swarm([Span(0, 15), Span(15, 30)], threads=1) as (servers, proxies):
                proxies.shape(one_way_s=0.01, bytes_per_s=BYTES_PER_S)
                async with aconnect([server.address for server in servers], parts=parts) as client:
                    for _ in range(2):  # the first tells how fast the lines are
                        before = client.traffic
                        generation = await client.generate(prompt, NEW_TOKENS, stop_at_eos=False)
                        assert list(generation.token_ids) == expected
                    last = client.traffic.since(before)
                    plain_bytes = (PROMPT_TOKENS + NEW_TOKENS - 1) * client.model.row_bytes
                    for crossed, plain in (
                        (last.sent_bytes, last.sent_plain_bytes),
                        (last.received_bytes, last.received_plain_bytes),
                    ):
                        assert plain == plain_bytes
                        assert crossed < 0.88 * plain
                    living = client.router.finder.pool.living()
                    described = [await connection.describe(DEADLINE_S) for connection in living]
                    for each in described:
                        assert each.positions == 2 * (PROMPT_TOKENS + NEW_TOKENS - 1)
                        assert each.sent_plain_bytes == each.received_plain_bytes == 2 * plain_bytes
                        assert each.sent_bytes < each.sent_plain_bytes
                        assert each.received_bytes < each.received_plain_bytes

    with torch.inference_mode():
        ids = torch.tensor([prompt])
        text = transformers_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    expected = text[0, PROMPT_TOKENS:].tolist()
    trio.run(generate)
