"""The speed of a worker is measured by sessions that are closed afterwards, whatever KV there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from llmnode.compute.thread_worker import ThreadWorker
from llmnode.core.ids import SessionId
from llmnode.core.model import ModelInfo
from llmnode.core.operations import Close, Open
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.node.serve.speed import PROMPT, SESSIONS, STEPS, measure_speed, step_us
from llmnode.testing.worker import ExactExecutor

MODEL = ModelInfo("exact", b"d" * 32, blocks=4, hidden_size=4, context_tokens=4096, precision="float32")
SPAN = Span(0, 4)


def worker_with(kv_tokens: int) -> ThreadWorker:
    return ThreadWorker(ExactExecutor(SPAN, MODEL.row_bytes, kv_tokens))


@pytest.mark.parametrize(
    ("kv_tokens", "context", "sessions", "prompt"),
    [(32_768, 4096, SESSIONS, PROMPT), (3 * STEPS, 4096, 3, 3 * STEPS), (5, 4096, 1, 5), (32_768, 8, SESSIONS, 8)],
)
def test_it_measures_as_many_sessions_and_as_long_a_prompt_as_fit(
    kv_tokens: int, context: int, sessions: int, prompt: int
) -> None:
    async def main() -> None:
        worker, rounds = worker_with(kv_tokens), []
        speed = await measure_speed(worker, replace(MODEL, context_tokens=context), 3, rounds.append)
        assert (speed.sessions, speed.prompt) == (sessions, prompt)
        assert rounds == [0, 1, 2, 3]
        for rates in (speed.decode, speed.decode_shared, speed.prefill):
            assert len(rates) == 3
            assert all(rate > 0 for rate in rates)
        assert worker.kv_tokens_free == kv_tokens, "its sessions are closed"

    trio.run(main)


def test_without_kv_it_says_so_and_a_server_announces_no_speed() -> None:
    async def main() -> None:
        worker, taken = worker_with(64), SessionId(bytes(16))
        assert await worker.do(Open(taken, SPAN, 64))
        with pytest.raises(ConfigError, match="no KV for"):
            await measure_speed(worker, MODEL, 1)
        assert await step_us(worker, MODEL) == 0
        await worker.do(Close(taken))
        assert await step_us(worker, MODEL) > 0

    trio.run(main)
