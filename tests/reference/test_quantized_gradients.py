"""Gradients through blocks in fewer bits, against PyTorch and PEFT over the whole model with the same rounded weights.

The servers' blocks are frozen, and their weights are rounded once. So the gradients that they give are those of the
rounded model, and not of the model in fp32. The README of the client has the figures.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from llmnode.models.families import family_of
from llmnode.models.weights.quantized import INT8_MAX, OUTLIER, Int8Linear, NF4Linear
from reference.lora import error
from reference.peft_batch import Found, batch_for, learn_cut, learn_whole, parts_of, with_adapters
from reference.small import make_model, open_saved

if TYPE_CHECKING:
    from pathlib import Path

    from reference.peft_batch import Learned

pytestmark = pytest.mark.reference

HELD: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "int8": {"quant": "int8"},
    "nf4": {"quant": "nf4"},
    "nf4 in bf16": {"quant": "nf4", "dtype": torch.bfloat16},
}


def _rounded(linear: Any, quant: str, dtype: torch.dtype) -> torch.Tensor:  # Any: Linear, or Conv1D
    """The weights that a server multiplies with, in fp32, in the layer's own order."""
    is_turned = isinstance(linear, Conv1D)
    weight = (linear.weight.T if is_turned else linear.weight).to(dtype)
    kind = {"int8": Int8Linear, "nf4": NF4Linear}[quant]
    with torch.no_grad():
        found: torch.Tensor = kind(weight, None)(torch.eye(weight.shape[1]))  # each input once, which 8 bits hold
    return found if is_turned else found.T


def _round(whole: Any, held: dict[str, Any]) -> None:
    """Give the blocks of a model of transformers the weights that servers have, in fp32."""
    dtype, quant = held.get("dtype", torch.float32), held.get("quant")
    family = family_of(whole.config)
    blocks = whole.get_submodule(family.block_prefix.rstrip("."))
    for parameter in blocks.parameters():
        parameter.copy_(parameter.to(dtype).float())
    if quant is not None:
        for linear in [each for each in blocks.modules() if isinstance(each, (torch.nn.Linear, Conv1D))]:
            linear.weight.copy_(_rounded(linear, quant, dtype))


def _round_inputs(_layer: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """LLM.int8: inputs have 8 bits, a scale a row, but for outliers. The gradient goes straight through."""
    (x,) = given
    small = x.detach().masked_fill(x.detach().abs() >= OUTLIER, 0)
    scale = small.abs().amax(-1, keepdim=True).clamp(min=1e-30) / INT8_MAX
    return (x + ((small / scale).round() * scale - small),)


MOST = {
    "bf16": (0.05, 0.1, 0.15),
    "fp16": (0.01, 0.02, 0.03),
    "int8": (0.07, 0.15, 0.25),
    "int8, inputs rounded alike": (5e-6, 1e-5, 1e-5),
    "int8, a number rounded to the other side": (0.02, 0.02, 0.02),
    "nf4": (5e-6, 1e-5, 1e-5),
    "nf4 in bf16": (0.05, 0.1, 0.15),
}
"""The most norm-relative error of a sequence's scores and gradient, and of the gradient of a matrix of an adapter.

Weights are rounded alike, so in fp32 only the order of sums differs. In bf16 servers round each product, and in int8
the inputs of each layer. An input between two numbers of int8 may be rounded to either: which one depends on the CPU.
"""


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_gradients_are_those_of_the_model_with_the_rounded_weights(case: str, held: str, tmp_path: Path) -> None:
    whole = make_model(case, tied=False)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    _round(whole, HELD[held])
    prefix = family_of(folder.config).block_prefix
    blocks = whole.get_submodule(prefix.rstrip("."))
    linears = [each for each in blocks.modules() if isinstance(each, (torch.nn.Linear, Conv1D))]
    model = with_adapters(case, whole)
    found = Found({name: parts_of(model, name, prefix) for name in ("one", "two")})
    batch = batch_for(whole)
    ours = learn_cut(folder, found, batch, **HELD[held])
    _check(ours, learn_whole(model, found, batch), MOST[held])
    if held == "int8":
        for each in linears:
            each.register_forward_pre_hook(_round_inputs)
        theirs, most = learn_whole(model, found, batch), MOST["int8, inputs rounded alike"]
        off = sorted(error(a, b) for a, b in zip(ours.scores, theirs.scores, strict=True))
        assert off[len(off) // 2] < most[0], "most sequences have no number that is rounded to the other side"
        _check(ours, theirs, most if off[-1] < most[0] else MOST["int8, a number rounded to the other side"])


@pytest.mark.parametrize("times", [1e-9, 1e6])
def test_blocks_in_fp16_have_gradients_of_any_size(times: float, tmp_path: Path) -> None:
    """fp16 itself has no numbers below 6e-8, nor above 65,504."""
    whole = make_model("llama", tied=False)
    whole.save_pretrained(tmp_path)
    folder, held = open_saved(tmp_path), HELD["fp16"]
    _round(whole, held)
    model = with_adapters("llama", whole)
    found = Found({name: parts_of(model, name, family_of(folder.config).block_prefix) for name in ("one", "two")})
    usual = batch_for(whole)
    batch = replace(usual, weights=[times * each for each in usual.weights])
    _check(learn_cut(folder, found, batch, **held), learn_whole(model, found, batch), MOST["fp16"])


def _check(ours: Learned, theirs: Learned, most: tuple[float, float, float]) -> None:
    pairs = (
        (ours.scores, theirs.scores),
        (ours.of_inputs, theirs.of_inputs),
        (ours.of_matrices, theirs.of_matrices),
    )
    for (one, other), furthest in zip(pairs, most, strict=True):
        assert max(error(a, b) for a, b in zip(one, other, strict=True)) < furthest
