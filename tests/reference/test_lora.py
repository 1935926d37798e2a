"""Parts of low-rank adapters: they are checked, kept until they are forgotten, and fit weights of any form."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save
from torch.utils._python_dispatch import TorchDispatchMode

from llmnode.compute.gradients import _Row
from llmnode.compute.load_executor import load_executor
from llmnode.core.adapters import MOST_RANK
from llmnode.core.operations import Adopt, Backward, Evaluate, Forget
from llmnode.core.span import Span
from llmnode.errors import AdapterError, LocalProtocolError
from llmnode.models.fused import FusedSpan
from llmnode.models.lora import Lora, matrices, targets_of, values_of
from llmnode.models.tensors import from_bytes, to_bytes
from reference.lora import FURTHEST, adopt, digest, error
from reference.small import HIDDEN_SIZE, KV_TOKENS, open_saved, save_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.lora import Part

pytestmark = pytest.mark.reference

A, B = "lora_A.weight", "lora_B.weight"


def made_part(executor: SpanExecutor, block: int, names: Sequence[str]) -> Part:
    generator = torch.Generator().manual_seed(1)
    targets = targets_of(executor.model.blocks[block - executor.span.start])
    return {
        name: Lora(
            0.2 * torch.randn(2, targets[name].inputs, generator=generator),
            0.2 * torch.randn(targets[name].outputs, 2, generator=generator),
            1.5,
        )
        for name in names
    }


class Plain:
    """The obvious twin of what an adapted layer does: each part of its outputs gets its own update."""

    def __init__(self, product: Any, updates: Sequence[tuple[slice, Lora]]) -> None:
        self._product, self._updates = product, updates

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        output = self._product(input)
        update = torch.zeros(output.shape)
        for columns, lora in self._updates:
            update[..., columns] = (input.float() @ lora.a.T @ lora.b.T) * lora.scale
        return (output.float() + update).to(output.dtype)


@pytest.mark.parametrize(
    "held",
    [{}, {"dtype": torch.bfloat16}, {"quant": "int8"}, {"quant": "nf4"}],
    ids=["fp32", "bf16", "int8", "nf4"],
)
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_weights_of_any_form_get_the_update_and_give_gradients(case: str, held: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    folder, span = open_saved(tmp_path), Span(2, 4)
    ours, twin = (load_executor(folder, span, KV_TOKENS, **held) for _ in range(2))
    names = (
        ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj"] if case == "llama" else ["attn.c_attn", "mlp.c_fc"]
    )
    part = made_part(ours, 3, names)
    adopt(ours, digest("x"), {3: part})
    block = twin.model.blocks[1]
    targets = targets_of(block)
    for path in {targets[name].module for name in names}:
        own = [(targets[name], part[name]) for name in names if targets[name].module == path]
        updates = [(slice(target.first, target.first + target.outputs), lora) for target, lora in own]
        layer: Any = block.get_submodule(path)
        layer.forward = Plain(layer.forward, updates)
    if isinstance(twin.model, FusedSpan):
        twin.model.read_layers()
    hidden = torch.randn(17, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    asked = Evaluate(span, (9, 8), to_bytes(hidden))
    (output,), (expected,), (without,) = (
        each.run([one]) for each, one in ((ours, replace(asked, adapter=digest("x"))), (twin, asked), (ours, asked))
    )
    furthest = 1e-3 if "dtype" in held else FURTHEST
    assert error(from_bytes(output, HIDDEN_SIZE), from_bytes(expected, HIDDEN_SIZE)) < furthest
    assert error(from_bytes(output, HIDDEN_SIZE), from_bytes(without, HIDDEN_SIZE)) > 0.01
    back = Backward(span, (9, 8), to_bytes(hidden), to_bytes(hidden.flip(0)))
    (gradient,) = ours.run([replace(back, adapter=digest("x"), adapter_values=values_of(part))])
    for each in matrices(part):
        each.requires_grad_()
    row = _Row(twin.model, hidden.split([9, 8]))
    entering = hidden.clone().requires_grad_()
    theirs = torch.autograd.grad(row.through(span, entering), [entering, *matrices(part)], hidden.flip(0))
    sizes = [each.numel() for each in theirs]
    found = torch.frombuffer(bytearray(gradient), dtype=torch.float32).split(sizes)
    for one, other in zip(found, theirs, strict=True):
        assert error(one, other.flatten()) < furthest


class Products(TorchDispatchMode):
    """Counts products of matrices: those with one that has a dimension of `rank`, and the others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.low = self.frozen = 0

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}:
            dimensions = {size for each in args if isinstance(each, torch.Tensor) for size in each.shape}
            self.low += self._rank in dimensions
            self.frozen += self._rank not in dimensions
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_clients_with_adapters_of_their_own_share_the_products_of_the_frozen_weights(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    executor, span = load_executor(open_saved(tmp_path), Span(1, 3), KV_TOKENS), Span(1, 3)
    names = ["self_attn.q_proj", "mlp.down_proj"] if case == "llama" else ["attn.c_attn", "mlp.c_fc"]
    part = made_part(executor, 1, names)
    clients = [digest(name) for name in "abcd"]
    for each in clients:
        adopt(executor, each, {1: part, 2: part})
    hidden = torch.randn(17, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    numbers = to_bytes(hidden)
    evaluates = [Evaluate(span, (17,), numbers, adapter=each) for each in clients]
    values = 2 * values_of(part)
    backwards = [Backward(span, (17,), numbers, numbers, adapter=each, adapter_values=values) for each in clients]
    for passes in (evaluates, backwards):
        with Products(rank=2) as of_one:
            executor.run(passes[:1])
        with Products(rank=2) as of_all:
            executor.run(passes)
        assert of_all.frozen == of_one.frozen > 0
        assert of_all.low == len(clients) * of_one.low > 0


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> SpanExecutor:
    path = tmp_path_factory.mktemp("llama")
    save_model(path, "llama", tied=True)
    return load_executor(open_saved(path), Span(1, 3), KV_TOKENS)


def _tensors(changes: Mapping[str, torch.Tensor | None] | None = None) -> bytes:
    """A good part, but for the `changes`."""
    good = {A: torch.ones(2, HIDDEN_SIZE), B: torch.ones(HIDDEN_SIZE, 2), "scale": torch.tensor(1.0)}
    changed = good | dict(changes or {})
    return save({f"self_attn.q_proj.{name}": each for name, each in changed.items() if each is not None})


BAD: dict[str, dict[str, torch.Tensor | None]] = {
    "another size": {A: torch.ones(2, HIDDEN_SIZE + 1)},
    "outputs that the layer has not": {B: torch.ones(HIDDEN_SIZE + 1, 2)},
    "ranks that differ": {A: torch.ones(3, HIDDEN_SIZE)},
    "a rank of none": {A: torch.ones(0, HIDDEN_SIZE), B: torch.ones(HIDDEN_SIZE, 0)},
    "a high rank": {A: torch.ones(MOST_RANK + 1, HIDDEN_SIZE), B: torch.ones(HIDDEN_SIZE, MOST_RANK + 1)},
    "more dimensions": {A: torch.ones(2, HIDDEN_SIZE, 1)},
    "no number": {A: torch.full((2, HIDDEN_SIZE), float("nan"))},
    "infinity": {B: torch.full((HIDDEN_SIZE, 2), float("inf"))},
    "an infinite scale": {"scale": torch.tensor(float("inf"))},
    "many scales": {"scale": torch.ones(2)},
    "integers": {A: torch.ones(2, HIDDEN_SIZE, dtype=torch.int32)},
    "fp64": {A: torch.ones(2, HIDDEN_SIZE, dtype=torch.float64)},
    "no B": {B: None},
    "no scale": {"scale": None},
    "nothing but a scale": {A: None, B: None},
    "a layer that is not there": {"q_proj.lora_A.weight": torch.ones(2, HIDDEN_SIZE)},
    "a bias": {"lora_B.bias": torch.ones(HIDDEN_SIZE)},
}
GARBAGE = {
    "nothing": b"",
    "no tensors": (2).to_bytes(8, "little") + b"{}",
    "a pickle": pickle.dumps({"self_attn.q_proj.lora_A.weight": [1.0, 2.0]}),
    "a header of 10 GB": (10 << 30).to_bytes(8, "little") + bytes(100),
    "a header that is no JSON": (50).to_bytes(8, "little") + bytes(100),
    "cut": _tensors()[:-1],
    "too long": _tensors() + b"0",
    "a dtype that nobody knows": _tensors().replace(b"F32", b"F99"),
}


@pytest.mark.parametrize("case", [*BAD, *GARBAGE])
def test_a_part_that_does_not_fit_or_is_damaged_is_refused_and_nothing_is_kept(
    case: str, executor: SpanExecutor
) -> None:
    weights = _tensors(BAD[case]) if case in BAD else GARBAGE[case]
    with pytest.raises(AdapterError):
        executor.apply(Adopt(digest("bad"), 1, 4 * HIDDEN_SIZE, weights))
    assert not executor._adapters._held


def test_a_part_is_held_until_it_is_forgotten(executor: SpanExecutor) -> None:
    good, values = _tensors(), 4 * HIDDEN_SIZE
    asked = Evaluate(Span(1, 2), (2,), to_bytes(torch.eye(2, HIDDEN_SIZE)))
    with pytest.raises(AdapterError, match="was said"):
        executor.apply(Adopt(digest("good"), 1, values - 1, good))
    with pytest.raises(LocalProtocolError):
        executor.apply(Adopt(digest("good"), 0, values, good))
    assert executor.apply(Adopt(digest("good"), 1, values, good))
    named = replace(asked, adapter=digest("good"))
    (with_it,), (without,) = executor.run([named]), executor.run([asked])
    assert bytes(with_it) != bytes(without)
    assert executor.apply(Forget(digest("good")))
    assert executor.apply(Forget(digest("good")))
    with pytest.raises(LocalProtocolError):
        executor.run([named])
    assert executor.run([asked]) == [without]
