"""The output of a sequence does not depend on its batch mates, its chunks, its history, or the cut of the span."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.compute.attention import ragged_attention
from llmnode.compute.load_executor import load_executor
from llmnode.compute.thread_worker import ThreadWorker
from llmnode.core.ids import PeerId
from llmnode.core.operations import Close, Forward, Open, Slice, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError, ModelError
from llmnode.models.load import Ends, load_ends
from llmnode.models.tensors import from_bytes, to_bytes
from reference.small import (
    BLOCKS,
    HIDDEN_SIZE,
    KV_TOKENS,
    VOCABULARY,
    Cut,
    cut,
    deviation,
    make_model,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.compute.work import Done, Work
    from llmnode.wire.frame import Buffer

pytestmark = pytest.mark.reference

SEQUENCES = 3
MAX_LENGTH = 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("llama")
    model = make_model("llama", tied=False)
    model.save_pretrained(path)
    return model, path


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, MAX_LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def whole(saved: tuple[Any, Path]) -> Cut:
    return cut(open_saved(saved[1]), (0, 2, BLOCKS))


@pytest.fixture(scope="module")
def whole_span(saved: tuple[Any, Path]) -> tuple[SpanExecutor, Ends]:
    folder = open_saved(saved[1])
    return load_executor(folder, Span(0, BLOCKS), KV_TOKENS), load_ends(folder)


@pytest.fixture(scope="module")
def undisturbed(saved: tuple[Any, Path], tokens: torch.Tensor) -> torch.Tensor:
    """(sequences, tokens, hidden_size) after the last block, each sequence alone and in one forward."""
    alone = cut(open_saved(saved[1]), (0, BLOCKS))
    return torch.stack([alone.forward({session(row): tokens[row].tolist()})[session(row)] for row in range(SEQUENCES)])


@pytest.fixture(scope="module")
def epsilon(saved: tuple[Any, Path], tokens: torch.Tensor) -> float:
    """4 x the largest deviation of transformers itself in the output of the blocks, without norm and head."""
    model = make_model("llama", tied=False)
    model.model.norm = torch.nn.Identity()
    model.lm_head = torch.nn.Identity()
    with torch.inference_mode():
        return 4 * deviation(model, tokens)


ROUND = st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(1, 12), min_size=1)
"""The new tokens of some sequences, in one forward."""
ROUNDS = st.lists(st.tuples(ROUND, st.integers(0, SEQUENCES - 1), st.integers(0, 15)), min_size=1, max_size=10)
"""After each forward one sequence is cut back by a number of tokens."""


@settings(settings.get_profile("reference"), max_examples=60)
@given(rounds=ROUNDS)
@torch.inference_mode()
def test_any_interleaving_gives_the_same_hidden_states(
    rounds: list[tuple[dict[int, int], int, int]],
    whole: Cut,
    tokens: torch.Tensor,
    undisturbed: torch.Tensor,
    epsilon: float,
) -> None:
    position = [0] * SEQUENCES
    try:
        for lengths, cut_back, by in rounds:
            chunks = {row: tokens[row, position[row] :][:length].tolist() for row, length in lengths.items()}
            chunks = {row: chunk for row, chunk in chunks.items() if chunk}
            if chunks:
                outputs = whole.forward({session(row): chunk for row, chunk in chunks.items()})
            for row, chunk in chunks.items():
                expected = undisturbed[row, position[row] : position[row] + len(chunk)]
                assert (outputs[session(row)] - expected).abs().max() < epsilon
                position[row] += len(chunk)
            if position[cut_back]:
                position[cut_back] = max(0, position[cut_back] - by)
                whole.truncate(session(cut_back), position[cut_back])
    finally:
        whole.close()


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen2"])
@torch.inference_mode()
def test_sessions_over_different_parts_of_one_span_share_a_forward(case: str, tmp_path: Path) -> None:
    """The parts of a span have layer types of their own: sliding, sliding, full, sliding, full for gemma3."""
    model = make_model(case, tied=False)
    model.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    ids = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    ends = cut(folder, (0, 1)).ends
    executor = load_executor(folder, Span(0, BLOCKS), KV_TOKENS)
    through, early, late = session(0), session(1), session(2)
    for name, span in ((through, Span(0, BLOCKS)), (early, Span(0, 2)), (late, Span(2, BLOCKS))):
        assert executor.apply(Open(name, span, 24))

    scores: list[list[torch.Tensor]] = [[], []]
    half_way: Slice | None = None
    for start in (*range(0, 24, 6), 24):  # the second sequence's late blocks run a chunk behind its early ones
        pieces = [half_way] if half_way else []
        if start < 24:
            hidden = [to_bytes(ends.embed(row.tolist(), start)) for row in ids[:, start : start + 6]]
            pieces += [Slice(through, start, 6, hidden[0]), Slice(early, start, 6, hidden[1])]
        outputs = dict(zip((piece.session for piece in pieces), executor.forward(pieces), strict=True))
        if through in outputs:
            scores[0].append(ends.logits(from_bytes(outputs[through], HIDDEN_SIZE)))
        if late in outputs:
            scores[1].append(ends.logits(from_bytes(outputs[late], HIDDEN_SIZE)))
        half_way = Slice(late, start, 6, outputs[early]) if early in outputs else None

    deviations = (torch.stack([torch.cat(rows) for rows in scores]) - model(ids).logits).abs()
    assert deviations.max() < 4 * deviation(model, ids)


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "bloom", "falcon"])
@torch.inference_mode()
def test_a_piece_may_go_through_its_blocks_in_several_forwards(case: str, tmp_path: Path) -> None:
    """Others are at other blocks beside it. Once it is given up half way."""
    save_model(tmp_path, case, tied=False)
    folder = open_saved(tmp_path)
    executor, ends = load_executor(folder, Span(0, BLOCKS), KV_TOKENS), load_ends(folder)
    ids = torch.randint(VOCABULARY, (41,), generator=torch.Generator().manual_seed(4)).tolist()
    prefill, decode = to_bytes(ends.embed(ids[:40], 0)), to_bytes(ends.embed(ids[40:], 40))
    whole, cut_up, late = session(0), session(1), session(2)
    for name, span in ((whole, Span(0, BLOCKS)), (cut_up, Span(0, BLOCKS)), (late, Span(2, BLOCKS))):
        assert executor.apply(Open(name, span, 41))
    (expected,) = executor.forward([Slice(whole, 0, 40, prefill)])

    executor.forward([Slice(cut_up, 0, 40, prefill, 0, 3)])
    executor.apply(Truncate(cut_up, 0))
    for first, end, company in (
        (0, 1, []),
        (1, 2, [Slice(whole, 40, 1, decode)]),
        (2, BLOCKS, [Slice(late, 0, 40, prefill)]),
    ):
        output, *others = executor.forward([Slice(cut_up, 0, 40, b"" if first else prefill, first, end), *company])
        assert bool(output) == (end == BLOCKS)
        assert all(others)
    close = {"rtol": 0, "atol": 4 * deviation(make_model(case, tied=False), torch.tensor([ids]))}
    torch.testing.assert_close(from_bytes(output, HIDDEN_SIZE), from_bytes(expected, HIDDEN_SIZE), **close)
    executor.apply(Truncate(whole, 40))
    after = [executor.forward([Slice(name, 40, 1, decode)])[0] for name in (whole, cut_up)]
    torch.testing.assert_close(from_bytes(after[1], HIDDEN_SIZE), from_bytes(after[0], HIDDEN_SIZE), **close)


@torch.inference_mode()
def test_a_piece_that_leaves_out_blocks_is_refused(whole_span: tuple[SpanExecutor, Ends], tokens: torch.Tensor) -> None:
    executor, ends = whole_span
    hidden = to_bytes(ends.embed(tokens[0, :9].tolist(), 0))
    assert executor.apply(Open(session(0), executor.span, MAX_LENGTH))
    executor.forward([Slice(session(0), 0, 9, hidden, 0, 2)])
    for first, end, length in ((3, None, 9), (2, None, 8), (0, None, 9), (2, 2, 9), (2, BLOCKS + 1, 9)):
        with pytest.raises(LocalProtocolError):
            executor.forward([Slice(session(0), 0, length, b"" if first else hidden, first, end)])
    assert executor.forward([Slice(session(0), 0, 9, b"", 2)])[0]
    executor.apply(Close(session(0)))


def test_attention_sinks_are_refused() -> None:
    rows = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="sinks"):
        ragged_attention(torch.nn.Identity(), rows, rows, rows, None, s_aux=torch.zeros(1))


ACT = st.tuples(
    st.integers(0, SEQUENCES - 1), st.integers(1, 12), st.integers(0, 3), st.sampled_from(["ask", "ask", "give up"])
)
"""A sequence, a number of positions, a delay in turns of the event loop, and whether the result is awaited."""


class TimedWorker(ThreadWorker):
    """Each of its batches counts as a second on any machine. So the time allows a fixed number of blocks."""

    async def _run_in_thread(self, work: Work) -> tuple[Done, float, float]:
        done, began_s, _ = await super()._run_in_thread(work)
        return done, began_s, began_s + 1.0


@settings(settings.get_profile("reference"), max_examples=60)
@given(
    acts=st.lists(ACT, min_size=1, max_size=16),
    priorities=st.lists(st.sampled_from(Priority), min_size=SEQUENCES, max_size=SEQUENCES),
    most=st.integers(1, 16),
    time_s=st.sampled_from([0.02, 0.1, 0.5]),
)
def test_any_schedule_of_a_worker_gives_the_same_hidden_states(
    acts: list[tuple[int, int, int, str]],
    priorities: list[Priority],
    most: int,
    time_s: float,
    whole_span: tuple[SpanExecutor, Ends],
    tokens: torch.Tensor,
    undisturbed: torch.Tensor,
    epsilon: float,
) -> None:
    """The order, the sizes of parts, the company, and cancellations before the end do not matter.

    A batch takes a second here. Prefills have `time_s` of it: for a few positions, or a few blocks.
    """
    executor, ends = whole_span
    sizes = {"unmeasured_prefill": most, "most_prefill": most, "least_prefill": min(8, most)}
    times = {"stretch": 1 + time_s, "prefill_s": time_s, "gather_share": 0.0}
    policy = BatchPolicy(decode_positions=1, fast_prefill=4, **sizes, **times)  # type: ignore[arg-type]

    async def live(worker: ThreadWorker, row: int) -> None:
        assert await worker.do(Open(session(row), executor.span, MAX_LENGTH, PeerId(f"{row % 2}"), priorities[row]))
        position = 0
        for _, length, turns, what in (act for act in acts if act[0] == row):
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            if not (chunk := tokens[row, position:][:length].tolist()):
                break
            piece = Forward(session(row), position, len(chunk), to_bytes(ends.embed(chunk, position)))
            with trio.CancelScope() as scope:
                if what == "give up":
                    scope.deadline = trio.current_time() + 0.001
                hidden = from_bytes((await worker.do(piece)).hidden, HIDDEN_SIZE)
                expected = undisturbed[row, position : position + len(chunk)]
                assert (hidden - expected).abs().max() < epsilon
                position += len(chunk)
        await worker.do(Close(session(row)))

    async def main() -> None:
        worker = TimedWorker(executor, policy)
        async with trio.open_nursery() as nursery:
            for row in range(SEQUENCES):
                nursery.start_soon(live, worker, row)

    trio.run(main)
    assert executor.kv_tokens_free() == KV_TOKENS


def test_a_worker_lets_a_prefill_go_through_a_few_blocks_between_decodes(
    whole_span: tuple[SpanExecutor, Ends],
    tokens: torch.Tensor,
    undisturbed: torch.Tensor,
    epsilon: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, ends = whole_span
    forward, batches = executor.forward, []

    def noted(pieces: Sequence[Slice]) -> Sequence[Buffer]:
        batches.append([(piece.session, piece.first, piece.end) for piece in pieces])
        return forward(pieces)

    async def ask(worker: ThreadWorker, row: int, start: int, end: int) -> None:
        piece = Forward(session(row), start, end - start, to_bytes(ends.embed(tokens[row, start:end].tolist(), start)))
        hidden = from_bytes((await worker.do(piece)).hidden, HIDDEN_SIZE)
        assert (hidden - undisturbed[row, start:end]).abs().max() < epsilon

    async def main() -> None:
        worker = TimedWorker(executor, BatchPolicy(decode_positions=1, stretch=1.25, fast_prefill=16, gather_share=0.0))
        for row in range(2):
            assert await worker.do(Open(session(row), executor.span, MAX_LENGTH, PeerId(f"{row}")))
        await ask(worker, 0, 0, 1)
        await ask(worker, 1, 0, 16)
        monkeypatch.setattr(executor, "forward", noted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, worker, 1, 16, MAX_LENGTH)
            for position in range(1, 6):
                await ask(worker, 0, position, position + 1)
        for row in range(2):
            await worker.do(Close(session(row)))

    trio.run(main)
    layered = [(first, end) for pieces in batches for name, first, end in pieces if name == session(1)]
    assert any(first for first, _ in layered)
    order = [name for pieces in batches for name, *_ in pieces]
    assert order[order.index(session(1)) :][:4] == [session(1), session(0)] * 2, "in turn"


def test_a_piece_at_a_wrong_position_fails_and_its_batch_mates_do_not(
    whole_span: tuple[SpanExecutor, Ends], tokens: torch.Tensor, undisturbed: torch.Tensor, epsilon: float
) -> None:
    executor, ends = whole_span
    outputs: dict[int, torch.Tensor] = {}

    async def ask(worker: ThreadWorker, row: int, start: int) -> None:
        piece = Forward(session(row), start, 5, to_bytes(ends.embed(tokens[row, :5].tolist(), 0)))
        outputs[row] = from_bytes((await worker.do(piece)).hidden, HIDDEN_SIZE)

    async def ask_wrongly(worker: ThreadWorker, row: int) -> None:
        with pytest.raises(LocalProtocolError, match="do not continue"):
            await ask(worker, row, 7)

    async def main() -> None:
        worker = ThreadWorker(executor)
        for row in range(SEQUENCES):
            assert await worker.do(Open(session(row), executor.span, MAX_LENGTH, PeerId("")))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, worker, 0, 0)
            nursery.start_soon(ask_wrongly, worker, 1)
            nursery.start_soon(ask, worker, 2, 0)
        for row in range(SEQUENCES):
            await worker.do(Close(session(row)))

    trio.run(main)
    assert sorted(outputs) == [0, 2]
    for row, hidden in outputs.items():
        assert (hidden - undisturbed[row, :5]).abs().max() < epsilon
