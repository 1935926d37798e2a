"""Blocks with quantized weights: every row by itself, any cut the same, near what they were, and as small as said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from llmnode.compute.load_executor import load_executor
from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.core.span import Span
from llmnode.errors import ModelError
from llmnode.models.size import measure_size
from llmnode.models.weights.quantized import OUTLIER, Int8Linear, NF4Linear
from reference.small import (
    BLOCKS,
    CONFIGS,
    DENSE,
    EXPERTS,
    KV_TOKENS,
    VOCABULARY,
    cut,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.reference


def _rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "furthest"), [(Int8Linear, 0.02), (NF4Linear, 0.15)], ids=["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_a_product_is_near_that_of_the_weights(
    kind: type[Int8Linear | NF4Linear], furthest: float, dtype: torch.dtype
) -> None:
    linear = torch.nn.Linear(96, 40, dtype=dtype)
    rows = _rows(2, 17, 96).to(dtype)
    ours, exact = kind(linear.weight, linear.bias)(rows), linear(rows)
    assert ours.dtype is dtype
    assert ours.shape == exact.shape
    error = (ours - exact).float().norm() / exact.float().norm()
    assert 0 < error < furthest


@torch.inference_mode()
def test_an_int8_row_is_the_same_to_the_bit_whatever_its_mates() -> None:
    linear = Int8Linear(_rows(40, 96), None)
    rows = _rows(9, 96, seed=1)
    assert rows.abs().max() < OUTLIER
    together = linear(rows)
    assert all(torch.equal(linear(rows[[index]])[0], together[index]) for index in range(9))
    scaled = linear(torch.cat([rows[:1], 0.9 * OUTLIER * torch.ones(3, 96)]))
    assert torch.equal(scaled[0], together[0])


@pytest.mark.parametrize("mate", [1e4, float("inf"), float("nan")])
@torch.inference_mode()
def test_outliers_and_what_is_no_number_stay_in_their_row(mate: float) -> None:
    linear = Int8Linear(_rows(40, 96), _rows(40, seed=3))
    rows = _rows(3, 96, seed=1)
    rows[1, [5, 70]] = torch.tensor([30.0, -200.0])
    alone = linear(rows)
    odd = torch.full((1, 96), mate)
    beside = linear(torch.cat([odd, rows]))[1:]
    assert torch.equal(beside[[0, 2]], alone[[0, 2]])  # without outliers of their own
    torch.testing.assert_close(beside[1], alone[1], rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def test_an_outlier_does_not_coarsen_the_rest_of_its_row() -> None:
    weight, row = _rows(40, 96), _rows(1, 96, seed=1)
    weight[:, 7] = 0
    row[0, 7] = 0
    linear = Int8Linear(weight, None)
    expected = linear(row)
    row[0, 7] = 1000
    assert torch.equal(linear(row), expected)


@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("case", DENSE)
@torch.inference_mode()
def test_any_cut_and_company_is_the_same_model_and_as_small_as_said(case: str, quant: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    tokens = torch.randint(VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1)).tolist()
    whole, parts = cut(folder, (0, BLOCKS), quant=quant), cut(folder, (0, 1, 4, BLOCKS), quant=quant)
    plain = cut(folder, (0, BLOCKS))
    expected = whole.forward({session(0): tokens[0]})[session(0)]
    made = []
    for start, end in ((0, 13), (13, 14), (14, 30)):
        chunks = {session(1): tokens[1][start:end], session(0): tokens[0][start:end]}
        made.append(parts.forward(chunks)[session(0)])
    apart = (torch.cat(made) - expected).norm(dim=1) / expected.norm(dim=1)
    # An input half-way between two steps of int8 goes to either by the last bit of a sum.
    assert apart.median() < {"int8": 1e-3, "nf4": 1e-5}[quant]
    assert apart.max() < {"int8": 0.05, "nf4": 1e-5}[quant]
    exact = plain.forward({session(0): tokens[0]})[session(0)]
    off = (expected - exact).norm(dim=1) / exact.norm(dim=1)
    assert {"int8": 0.01, "nf4": 0.1}[quant] < off.median() < {"int8": 0.1, "nf4": 0.8}[quant]
    size, unquantized = measure_size(folder, quant=quant), measure_size(folder)
    assert size.block_bytes < 0.4 * unquantized.block_bytes
    assert (size.ends_bytes, size.kv_token_bytes) == (unquantized.ends_bytes, unquantized.kv_token_bytes)
    assert parts.executors[0].tensor_bytes == size.block_bytes
    assert whole.executors[0].tensor_bytes == BLOCKS * size.block_bytes


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_refused_before_anything_is_read(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    for file in set(folder.files.values()):
        file.unlink()
    with pytest.raises(ModelError, match="without --quant"):
        load_executor(folder, Span(0, 1), KV_TOKENS, quant="int8")
    with pytest.raises(ModelError, match="without --quant"):
        measure_size(folder, quant="nf4")


@pytest.mark.parametrize("fast", ["int8", "nf4"])
@pytest.mark.parametrize("case", CONFIGS)
def test_auto_is_for_whatever_can_be_quantized(
    case: str, fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmnode.models.weights.quantized.fast_quant", lambda _device: fast)
    save_model(tmp_path, case, tied=True)
    loader = SpanLoader(Wanted(str(tmp_path), quant="auto", device="cpu", kv_tokens=KV_TOKENS), print)
    assert loader.open_model().precision.name == ("float32" if case in EXPERTS else f"float32+{fast}")
    if case in EXPERTS:
        assert loader.load(Span(0, 1)).tensor_bytes
