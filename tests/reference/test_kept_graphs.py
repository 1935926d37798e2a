"""A backward that keeps the graphs of some blocks: they change no bit, and take the memory that it counts."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmnode.compute import gradients
from llmnode.compute.adapted import AdaptedRows, adapt
from llmnode.compute.deep_prompts import PromptedSequences
from llmnode.compute.dropout import DroppedRows
from llmnode.compute.gradients import gradients_of
from llmnode.compute.load_executor import load_executor
from llmnode.core.operations import Dropout
from llmnode.core.span import Span
from llmnode.models.lora import Lora, targets_of
from reference.small import BLOCKS, HIDDEN_SIZE, KV_TOKENS, make_model, open_saved
from reference.test_narrow import rounded_to_4_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.compute.gradients import SpanGradients
    from llmnode.models.lora import Part

pytestmark = pytest.mark.reference

SPAN = Span(1, BLOCKS)
LENGTHS = (23, 1, 9)
HALF, FOUR_BITS = "bf16 on disk", "4 bits on disk"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Kept(NamedTuple):
    found: SpanGradients
    graphs: int
    """Their number when the last block had been computed."""
    forwards: int
    """The number of forwards of one block."""


class Backwards:
    """Backwards through `executor`, of three sequences. Two have adapters, one with dropout; all have deep prompts."""

    def __init__(self, executor: SpanExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model = executor.model
        self._blocks: list[Any] = []
        self._forwards = 0
        adapt(executor.model)
        parts = [
            {index: self._part(index, rank) for index in range(SPAN.start + rank - 2, SPAN.end)} for rank in (2, 3)
        ]
        dropout = DroppedRows(Dropout(0.2, (7,)), (9,), torch.device("cpu"))
        self._rows = [AdaptedRows(0, 23, parts[0]), AdaptedRows(24, 33, parts[1], dropout)]
        self._monkeypatch = monkeypatch

    def _part(self, index: int, rank: int) -> Part:
        targets = targets_of(self._model.blocks[index - self._model.span.start])
        return {
            name: Lora(0.2 * drawn(rank, each.inputs), 0.2 * drawn(each.outputs, rank, seed=1), 1.5)
            for name, each in targets.items()
        }

    def run(self, graph_bytes: int) -> Kept:
        sequences, wanted = ([drawn(each, HIDDEN_SIZE, seed=sign * each) for each in LENGTHS] for sign in (1, -1))
        prompts = PromptedSequences(drawn(len(SPAN), 1, 1, HIDDEN_SIZE, seed=5), SPAN.start, [0, 23, 24])
        computed, through, forwards = gradients._computed, gradients._Row.through, []
        kept: list[int] = []

        def count_kept(*given: Any) -> Any:
            blocks = computed(*given)
            kept.append(sum(each._graph is not None for each in blocks))
            return blocks

        def count_forwards(row: Any, span: Span, states: torch.Tensor) -> torch.Tensor:
            forwards.append(span)
            return through(row, span, states)

        with self._monkeypatch.context() as patched:
            patched.setattr(gradients, "_computed", count_kept)
            patched.setattr(gradients._Row, "through", count_forwards)
            found = gradients_of(self._model, SPAN, sequences, wanted, self._rows, [prompts], graph_bytes)
        return Kept(found, kept[0], len(forwards))


def load(case: str, held: dict[str, Any] | str, path: Path) -> SpanExecutor:
    model = make_model(case, tied=True)
    if held == HALF:
        model = model.to(torch.bfloat16)
    elif held == FOUR_BITS:
        model = rounded_to_4_bits(model, centred=False)
    model.save_pretrained(path)
    executor = load_executor(open_saved(path), SPAN, KV_TOKENS, **(held if isinstance(held, dict) else {}))
    kinds = {HALF: "HalfLinear", FOUR_BITS: "Q4Linear"}
    if isinstance(held, str):
        assert kinds[held] in {type(each).__name__ for each in executor.model.modules()}
    return executor


@pytest.mark.parametrize(
    ("case", "held"),
    [
        ("llama", {}),
        ("llama", HALF),
        ("llama", FOUR_BITS),
        ("llama", {"quant": "int8"}),
        ("llama", {"dtype": torch.bfloat16}),
        ("gpt2", {}),
        ("gpt2", {"quant": "int8"}),
        ("mixtral", {}),
        ("gemma2", {}),
    ],
    ids=str,
)
def test_the_number_of_kept_graphs_changes_no_bit(
    case: str, held: dict[str, Any] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = Backwards(load(case, held, tmp_path), monkeypatch)
    none = backwards.run(0)
    assert (none.graphs, none.forwards) == (1, 2 * len(SPAN) - 1), "the last block is computed once in any case"
    assert len(none.found.adapters) == 2 and all(each.isfinite().all() for each in none.found.adapters)
    numbers = set[int]()

    def run(budget: int) -> int:
        found = backwards.run(budget)
        numbers.add(found.graphs)
        assert found.forwards == 2 * len(SPAN) - found.graphs
        for ours, theirs in zip(found.found, none.found, strict=True):
            assert len(ours) == len(theirs)
            assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        return found.graphs

    budget = 1
    while run(4 * budget) == 1:
        budget *= 4
    while run(budget) < len(SPAN):
        budget = budget * 5 // 4 + 1
    assert numbers == set(range(1, len(SPAN) + 1))


class Living(TorchDispatchMode):
    """Counts the memory of tensors that were made in this context and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.storages[storage.data_ptr()] = storage
        return result

    def size_bytes(self, known: Iterator[torch.Tensor]) -> int:
        before = {each.untyped_storage().data_ptr() for each in known}
        return sum(each.nbytes() for at, each in self.storages.items() if at not in before)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral", "bloom", "gemma2", "falcon-new"])
def test_a_graph_takes_the_memory_that_is_counted(case: str, tmp_path: Path) -> None:
    executor = load(case, {}, tmp_path)
    row = gradients._Row(executor.model, [drawn(each, HIDDEN_SIZE) for each in (31, 40)])
    entering = drawn(71, HIDDEN_SIZE)
    block = gradients._Block(row, SPAN.start, entering, ())
    with Living() as living:
        leaving = block.output_with_graph()
    lives = living.size_bytes(iter([entering, leaving, *row.tensors_of(SPAN.start)]))
    assert lives > 71 * HIDDEN_SIZE * 4
    assert 0.9 * lives < block.graph_bytes < 1.1 * lives


def test_a_graph_keeps_no_weights_that_were_widened(tmp_path: Path) -> None:
    counted = set()
    for number, held in enumerate(({}, HALF)):
        executor = load("llama", held, tmp_path / str(number))
        row = gradients._Row(executor.model, [drawn(31, HIDDEN_SIZE)])
        block = gradients._Block(row, SPAN.start, drawn(31, HIDDEN_SIZE), ())
        block.output_with_graph()
        counted.add(block.graph_bytes)
    assert len(counted) == 1
