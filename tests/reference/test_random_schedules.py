"""A session's tokens are exact (`tests/README.md`) for any order, company, priority and chunking of its steps.

A schedule depends on the draw alone: the worker has no thread, and a batch takes a second of a mock clock.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kit.exact import Reference
from llmnode.compute.batching import BatchingWorker
from llmnode.compute.load_executor import load_executor
from llmnode.compute.work import Done, Work, do
from llmnode.core.ids import PeerId
from llmnode.core.operations import Close, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.models.load import load_ends
from llmnode.models.native import MOST_POSITIONS
from llmnode.models.tensors import from_bytes, to_bytes
from reference.small import BLOCKS, HIDDEN_SIZE, KV_TOKENS, VOCABULARY, open_saved, save_model, session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor

pytestmark = pytest.mark.reference

SESSIONS = 6
LENGTH = 100
*TEXTS, OTHER = torch.randint(VOCABULARY, (SESSIONS + 1, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
EXAMPLES = 12
TIES = 1 / 1000
"""The largest share of ties among all positions."""

CASES = {
    "llama in Rust": ("llama", MOST_POSITIONS),
    "llama by torch": ("llama", 0),
    "mistral by turns": ("mistral", 7),
    "gemma3": ("gemma3_text", 0),
    "gpt2": ("gpt2", 0),
    "bloom": ("bloom", 0),
    "falcon": ("falcon-new", 0),
    "falcon with ALiBi": ("falcon-alibi", 0),
}
"""Each kind of attention, and the most positions that go through Rust (0: none do)."""

ACT = st.tuples(
    st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.5]),
    st.one_of(st.just(1), st.integers(1, 8), st.integers(9, 40)),
    st.sampled_from(["ask", "ask", "ask", "give up", "go astray"]),
)
"""A delay in seconds, a number of positions, and their fate: awaited, given up, or other positions taken back."""


@dataclass(frozen=True)
class Life:
    """The priority and the acts of a session."""

    priority: Priority
    acts: list[tuple[float, int, str]]


LIVES = st.lists(
    st.builds(Life, st.sampled_from(Priority), st.lists(ACT, min_size=4, max_size=10)),
    min_size=SESSIONS,
    max_size=SESSIONS,
)


@st.composite
def policies(draw: st.DrawFn) -> BatchPolicy:
    """Prefills have `time_s` in a batch, for a few positions or many, or for a few blocks."""
    time_s, most = draw(st.sampled_from([0.2, 1.0, 5.0])), draw(st.sampled_from([12, 40, 120]))
    return BatchPolicy(
        decodes=draw(st.sampled_from([2, 64])),
        stretch=1 + time_s,
        prefill_s=time_s,
        unmeasured_prefill=most,
        fast_prefill=draw(st.sampled_from([4, 128])),
        most_prefill=most,
    )


class ClockedWorker(BatchingWorker):
    """A failed forward is not repeated in halves, as other workers do it."""

    def __init__(self, executor: SpanExecutor, policy: BatchPolicy) -> None:
        super().__init__(executor, partial(self._run_inline, executor), trio.current_time, policy)

    async def _run_inline(self, executor: SpanExecutor, work: Work) -> tuple[Done, float, float]:
        began_s = trio.current_time()
        results = do(executor, Work(work.operations, ())).results
        outputs = executor.forward(work.slices) if work.slices else ()
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
        return Done(results, outputs), began_s, trio.current_time()


@pytest.mark.parametrize("case", CASES)
def test_any_schedule_is_exact(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    name, most_in_rust = CASES[case]
    save_model(tmp_path, name, tied=False)
    folder = open_saved(tmp_path)
    monkeypatch.setattr("llmnode.models.native.MOST_POSITIONS", most_in_rust)
    with nullcontext() if most_in_rust else patch("llmnode.models.load.native_blocks", lambda *_: None):
        executor = load_executor(folder, Span(0, BLOCKS), KV_TOKENS)
    ends, reference = load_ends(folder), Reference(tmp_path)
    *embedded, astray = (ends.embed(text, 0) for text in (*TEXTS, OTHER))
    positions = near_ties = 0

    @settings(settings.get_profile("reference"), max_examples=EXAMPLES)
    @given(lives=LIVES, policy=policies())
    def check(lives: list[Life], policy: BatchPolicy) -> None:
        nonlocal positions, near_ties
        for text, hidden in zip(TEXTS, run(executor, lives, policy, embedded, astray), strict=True):
            chosen = dict(enumerate(ends.logits(hidden).argmax(1).tolist(), 1))
            ties, wrong = reference.judge_choices(text, chosen)
            assert not wrong, f"of {len(chosen)} positions"
            positions, near_ties = positions + len(chosen), near_ties + ties

    check()
    for figure, value in (("epsilon", reference.epsilon), ("positions", positions), ("near ties", near_ties)):
        record_property(figure, value)
    assert near_ties <= TIES * positions
    assert positions > 1 / TIES


def run(
    executor: SpanExecutor, lives: list[Life], policy: BatchPolicy, embedded: list[torch.Tensor], astray: torch.Tensor
) -> list[torch.Tensor]:
    """(positions, hidden_size) after the last block for each session, as far as it got."""
    outputs = [[torch.empty(0, HIDDEN_SIZE)] for _ in lives]

    async def live(worker: ClockedWorker, row: int) -> None:
        name, position = session(row), 0
        assert await worker.do(Open(name, executor.span, LENGTH, PeerId(f"{row % 3}"), lives[row].priority))
        for after_s, length, what in lives[row].acts:
            await trio.sleep(after_s)
            states = (astray if what == "go astray" else embedded[row])[position:][:length]
            if not len(states):
                break
            with trio.move_on_after(1.5 if what == "give up" else inf):  # before its batch, in it, or half way through
                computed = await worker.do(Forward(name, position, len(states), to_bytes(states)))
                if what == "go astray":
                    await worker.do(Truncate(name, position))
                else:
                    outputs[row].append(from_bytes(computed.hidden, HIDDEN_SIZE))
                    position += len(states)

    async def main() -> None:
        worker = ClockedWorker(executor, policy)
        async with trio.open_nursery() as nursery:
            for row in range(len(lives)):
                nursery.start_soon(live, worker, row)

    try:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        for row in range(len(lives)):
            executor.apply(Close(session(row)))
    assert executor.kv_tokens_free() == KV_TOKENS
    return [torch.cat(each) for each in outputs]
