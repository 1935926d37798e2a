"""KV in pages of one pool, as on a GPU: the results are the same as with a slab for each sequence.

Most of it needs no GPU. Attention through copies of pages is torch's own everywhere. Flash attention is replaced by
what torch's documentation says of it, and recordings by a trace.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen

from llmnode.compute import cuda_graphs
from llmnode.compute.load_executor import load_executor
from llmnode.compute.paged_executor import PagedExecutor
from llmnode.compute.pages import FLASH_DTYPES
from llmnode.core.operations import Close, Fork, Open, Resize, Slice, Truncate
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError
from llmnode.models.tensors import from_bytes, to_bytes
from reference.paged import (
    BY_THEMSELVES,
    PAGE,
    cut_paged,
    load_paged,
    record_by_tracing,
    varlen_attn,
)
from reference.small import (
    BLOCKS,
    CONFIGS,
    HIDDEN_SIZE,
    KV_TOKENS,
    OF_EACH_KIND,
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
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from llmnode.compute.cuda_graphs import Replay
    from llmnode.models.sources.folder import ModelFolder

pytestmark = pytest.mark.reference

ROUNDS: tuple[dict[int, int], ...] = (
    {0: 11, 1: 1},
    {0: 7, 1: 1, 2: 13},
    *({0: 1, 1: 1, 2: 1},) * 10,
    {0: 9, 2: 1},
    *({1: 1, 2: 1},) * 8,
)
"""The new tokens of each sequence in each forward. Three sequences, and two, decode for long enough to be recorded."""


class Said(logging.Handler):
    """Collects the warnings about parts that are left out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        taken, self._lines = self._lines, []
        return taken


@pytest.fixture(autouse=True)
def said() -> Iterator[Said]:
    """The warnings. Those that a test does not take make it fail."""
    handler, logger = Said(), logging.getLogger("llmnode.compute")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    assert handler.take() == []


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention for numbers of any bits, so that it can be compared."""
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)


def through_rounds(through: Cut, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The output of the blocks for each sequence."""
    made: list[list[torch.Tensor]] = [[] for _ in tokens]
    at = [0] * len(tokens)
    for lengths in ROUNDS:
        chunks = {session(row): tokens[row, at[row] :][:length].tolist() for row, length in lengths.items()}
        outputs = through.forward(chunks)
        for row, length in lengths.items():
            made[row].append(outputs[session(row)])
            at[row] += length
    return [torch.cat(each) for each in made]


@pytest.mark.parametrize("case", CONFIGS)
@torch.inference_mode()
def test_every_family_computes_the_same_over_pages_and_its_steps_can_be_recorded(
    case: str, tmp_path: Path, said: Said
) -> None:
    paged = _compare(case, tmp_path, record=record_by_tracing)
    recorded = [len(executor._forwards._recorded) for executor in paged.executors]
    if case in BY_THEMSELVES:
        lines = said.take()
        assert len(lines) == len(recorded) and recorded == [0, 0]
        assert all("recorded steps, which cannot be made here: this model's attention takes" in line for line in lines)
    else:
        assert said.take() == []
        assert min(recorded) > 2, "of three sequences and of two, on one page and on more"


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("case", OF_EACH_KIND)
@torch.inference_mode()
def test_flash_attention_is_told_what_the_sequences_are(case: str, tmp_path: Path, said: Said) -> None:
    paged = _compare(case, tmp_path, flash=True)
    assert said.take() == []
    assert all(executor._pool.flash for executor in paged.executors)


def _compare(case: str, path: Path, **options: Any) -> Cut:  # Any: the options of `load_paged`
    model = make_model(case, tied=False)
    model.save_pretrained(path)
    folder, edges = open_saved(path), (0, 2, BLOCKS)
    tokens = torch.randint(VOCABULARY, (3, 48), generator=torch.Generator().manual_seed(1))
    paged = cut_paged(folder, edges, **options)
    expected, found = (through_rounds(each, tokens) for each in (cut(folder, edges), paged))
    paged.close()
    epsilon = 4 * deviation(model, tokens)
    for ours, theirs in zip(found, expected, strict=True):
        assert (paged.ends.logits(ours) - paged.ends.logits(theirs)).abs().max() < epsilon
    return paged


@torch.inference_mode()
def test_whoever_had_a_page_before_leaves_nothing_in_it_for_the_next(tmp_path: Path) -> None:
    folder = _llama(tmp_path)
    executor = load_paged(folder, Span(0, BLOCKS))
    rows = torch.randn(12, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected = _chunks(executor, rows, (9, 1, 1, 1))
    assert expected.isfinite().all()
    _chunks(executor, torch.full((KV_TOKENS, HIDDEN_SIZE), float("nan")), (KV_TOKENS,))
    assert torch.equal(_chunks(executor, rows, (9, 1, 1, 1)), expected)


@torch.inference_mode()
def test_what_was_taken_back_is_not_looked_at_even_if_it_was_no_number(tmp_path: Path) -> None:
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS))
    rows = torch.randn(12, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected = _chunks(executor, rows, (9, 1, 1, 1))
    assert executor.apply(Open(session(0), executor.span, 40))
    made = [_forward(executor, 0, 0, rows[:9])]
    _forward(executor, 0, 9, torch.full((20, HIDDEN_SIZE), float("nan")))
    executor.apply(Truncate(session(0), 9))
    made += [_forward(executor, 0, at, rows[at : at + 1]) for at in range(9, 12)]
    assert torch.equal(torch.cat(made), expected)


@torch.inference_mode()
def test_a_fork_has_pages_of_its_own(tmp_path: Path) -> None:
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS))
    rows = torch.randn(25, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected = _chunks(executor, rows, (19, 6))
    for name in (0, 1):
        assert executor.apply(Open(session(name), executor.span, 40))
    _forward(executor, 0, 0, rows[:21])
    _forward(executor, 1, 0, rows[:3])
    executor.apply(Fork(session(1), session(0), 3, 19))
    _forward(executor, 0, 21, -rows[:4])
    assert (_forward(executor, 1, 19, rows[19:]) - expected[19:]).abs().max() < 1e-4


@torch.inference_mode()
def test_a_sequence_that_gives_pages_back_and_gets_others_later_computes_the_same(tmp_path: Path) -> None:
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS))
    rows = torch.randn(25, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected = _chunks(executor, rows, (5, 14, 6))
    in_all = executor.kv_tokens_free()
    assert executor.apply(Open(session(0), executor.span, 40))
    assert executor.apply(Resize(session(0), 5))
    made = [_forward(executor, 0, 0, rows[:5])]
    for start, end in ((5, 19), (19, 25)):
        assert executor.apply(Open(session(start), executor.span, PAGE)), "others take pages between"
        assert executor.apply(Resize(session(0), end))
        made.append(_forward(executor, 0, start, rows[start:end]))
    assert (torch.cat(made) - expected).abs().max() < 1e-4
    assert in_all - executor.kv_tokens_free() == (4 + 2) * PAGE
    assert not executor.apply(Resize(session(0), in_all))
    with pytest.raises(LocalProtocolError, match="cannot keep 25"):
        executor.apply(Resize(session(0), 24))
    for name in (0, 5, 19):
        executor.apply(Close(session(name)))
    assert executor.kv_tokens_free() == in_all


@torch.inference_mode()
def test_there_are_as_many_pages_as_positions_need_and_none_is_lost(tmp_path: Path) -> None:
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS))
    in_all = executor.kv_tokens_free()
    assert in_all == KV_TOKENS
    assert executor.apply(Open(session(0), executor.span, 1))
    assert executor.kv_tokens_free() == in_all - PAGE
    assert executor.apply(Open(session(1), executor.span, in_all - PAGE))
    assert executor.kv_tokens_free() == 0
    assert not executor.apply(Open(session(2), executor.span, 1))
    executor.apply(Close(session(0)))
    assert executor.apply(Open(session(2), executor.span, PAGE))
    for name in (1, 2):
        executor.apply(Close(session(name)))
    assert executor.kv_tokens_free() == in_all
    assert sorted(executor._pool._free) == list(range(1, in_all // PAGE + 1))


@pytest.mark.usefixtures("flash")
def test_flash_attention_that_computes_something_else_is_not_used(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sees_two(*arguments: Any, **options: Any) -> torch.Tensor:
        return varlen_attn(*arguments, **{**options, "window_size": (1, 0), "num_splits": 1})

    monkeypatch.setattr(torch_varlen, "varlen_attn", sees_two)
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS), flash=True)
    (line,) = said.take()
    assert line.startswith("without flash attention, which computed something else here, off by ")
    assert not executor._pool.flash


def test_flash_attention_that_fails_is_not_used(tmp_path: Path, said: Said) -> None:
    """Torch's own fails on a CPU."""
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS), flash=True)
    (line,) = said.take()
    assert line.startswith("without flash attention, which cannot be used here: ")
    assert not executor._pool.flash


def test_recordings_that_compute_something_else_are_not_used(tmp_path: Path, said: Said) -> None:
    def stale(function: Any, hidden: torch.Tensor, numbers: torch.Tensor) -> Replay:
        output = function(hidden, numbers)
        return lambda: output

    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS), record=stale)
    (line,) = said.take()
    assert line.startswith("without recorded steps, which computed something else here, off by ")
    assert executor._forwards.record is None and not executor._forwards._recorded


def test_a_recording_that_fails_later_on_is_done_without(tmp_path: Path, said: Said) -> None:
    made: list[Replay] = []

    def until_full(function: Any, hidden: torch.Tensor, numbers: torch.Tensor) -> Replay:
        if len(made) == 3:
            raise RuntimeError("out of memory, as told")
        made.append(record_by_tracing(function, hidden, numbers))
        return made[-1]

    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS), record=until_full)
    assert said.take() == []
    rows = torch.randn(40, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = _chunks(executor, rows, (40,))
        assert (_chunks(executor, rows, (1,) * 40) - expected).abs().max() < 1e-4
    assert said.take() == ["without recorded steps, which cannot be made here: out of memory, as told"]


@torch.inference_mode()
def test_a_row_is_gathered_into_no_more_than_all_pages_and_is_right_beyond(tmp_path: Path) -> None:
    """It runs beside a long sequence."""
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS), record=record_by_tracing)
    rows = torch.randn(700, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected = _chunks(executor, rows, (700,))
    lengths = {0: 696, 1: 2, 2: 2}
    for name, length in lengths.items():
        assert executor.apply(Open(session(name), executor.span, length + 4))
        _forward(executor, name, 0, rows[:length])
    for number in range(4):
        at = {name: length + number for name, length in lengths.items()}
        pieces = [Slice(session(name), start, 1, to_bytes(rows[start : start + 1])) for name, start in at.items()]
        outputs = [from_bytes(output, HIDDEN_SIZE) for output in executor.forward(pieces)]
        assert all(
            (made - expected[start]).abs().max() < 1e-4 for made, start in zip(outputs, at.values(), strict=True)
        )
    most = max(shape.sequences * shape.pages for _, shape in executor._forwards._recorded)
    assert most * PAGE <= KV_TOKENS < 3 * 700


@torch.inference_mode()
def test_what_was_not_used_for_longest_goes_for_new_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_RECORDINGS", 2)
    executor = load_paged(_llama(tmp_path), Span(0, BLOCKS), record=record_by_tracing)
    rows = torch.randn(40, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    expected = _chunks(executor, rows, (40,))
    assert (_chunks(executor, rows, (1,) * 40) - expected).abs().max() < 1e-4
    assert [shape.pages for _, shape in executor._forwards._recorded] == [4, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention and CUDA graphs take a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", OF_EACH_KIND)
def test_a_gpu_computes_the_same_by_flash_attention_and_recorded_steps(
    case: str, dtype: torch.dtype, tmp_path: Path, said: Said
) -> None:
    save_model(tmp_path, case, tied=False)
    folder = open_saved(tmp_path)
    tokens = torch.randint(VOCABULARY, (3, 48), generator=torch.Generator().manual_seed(1))
    on_gpu = load_executor(folder, Span(0, BLOCKS), 4000, dtype, "cuda")
    assert isinstance(on_gpu, PagedExecutor)
    plain = cut(folder, (0, BLOCKS), dtype)
    expected = through_rounds(plain, tokens)
    found = through_rounds(Cut(plain.ends, [on_gpu]), tokens)
    most = 1e-4 if dtype == torch.float32 else 0.1
    assert all(((ours - theirs).norm() / theirs.norm()) < most for ours, theirs in zip(found, expected, strict=True))
    lines = said.take()
    if case not in BY_THEMSELVES:
        takes_pages = "block_table" in inspect.signature(torch_varlen.varlen_attn).parameters  # since torch 2.12
        by_flash = dtype in FLASH_DTYPES
        assert len(lines) == (by_flash and not takes_pages), lines
        assert on_gpu._pool.flash == (by_flash and takes_pages)
        assert on_gpu._forwards._recorded


def _llama(path: Path) -> ModelFolder:
    save_model(path, "llama", tied=False)
    return open_saved(path)


def _chunks(executor: PagedExecutor, rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The output of a session of its own for `rows`, in chunks of `chunk`."""
    assert executor.apply(Open(session(0), executor.span, len(rows)))
    made, at = [], 0
    for length in lengths:
        made.append(_forward(executor, 0, at, rows[at : at + length]))
        at += length
    executor.apply(Close(session(0)))
    return torch.cat(made)


def _forward(executor: PagedExecutor, name: int, start: int, rows: torch.Tensor) -> torch.Tensor:
    (output,) = executor.forward([Slice(session(name), start, len(rows), to_bytes(rows))])
    return from_bytes(output, HIDDEN_SIZE)
