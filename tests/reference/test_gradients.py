"""Gradients through a cut model, whose blocks are frozen elsewhere, against those of the whole one in transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmnode.compute.attention import Segment, segments_of_forward
from llmnode.compute.gradients import NoKV, gradients_of, outputs_of
from llmnode.compute.load_executor import load_executor
from llmnode.core.operations import Backward, Evaluate
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError
from llmnode.models.load import load_ends
from llmnode.models.meta_model import run_embedded
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.models.weights.packed_linear import found_narrow
from llmnode.models.weights.quantized import Int8Linear, NF4Linear
from reference.small import BLOCKS, CONFIGS, HIDDEN_SIZE, KV_TOKENS, VOCABULARY, make_model, open_saved, save_model

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor

pytestmark = pytest.mark.reference

EDGES = (0, 1, 4, BLOCKS)
LENGTHS = (23, 1, 9)
FURTHEST = 1e-5
"""The norm-relative error of a gradient in fp32."""


class Remote(torch.autograd.Function):
    """A span of blocks as autograd sees it: sequences end to end, (tokens, hidden_size)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, executor: SpanExecutor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.executor = executor
        return torch.cat(outputs_of(executor.model, executor.span, hidden.split(LENGTHS)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (hidden,) = ctx.saved_tensors
        split = hidden.split(LENGTHS), gradient.split(LENGTHS)
        return torch.cat(gradients_of(ctx.executor.model, ctx.executor.span, *split).states), None


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("case", CONFIGS)
def test_gradients_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    model = make_model(case, tied=False)
    model.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    embedding = model.get_input_embeddings()
    embedded = [embedding(tokens).detach().requires_grad_() for tokens in _tokens()]
    weights = [_drawn(length, VOCABULARY, seed=length) for length in LENGTHS]
    scores = [model(inputs_embeds=each[None]).logits[0] for each in embedded]
    theirs = torch.autograd.grad([(a * b).sum() for a, b in zip(scores, weights, strict=True)], embedded)

    ends = load_ends(folder)
    executors = [load_executor(folder, Span(*pair), KV_TOKENS) for pair in pairwise(EDGES)]
    positions = [torch.arange(length) for length in LENGTHS]
    entered = [
        ends.embedding(inputs_embeds=each[None], position_ids=at[None], use_cache=False).last_hidden_state[0]
        for each, at in zip(embedded, positions, strict=True)
    ]
    hidden = torch.cat(entered)
    for executor in executors:
        hidden = Remote.apply(hidden, executor)
    ours_scores = [run_embedded(ends.scoring, each).logits[0] for each in hidden.split(LENGTHS)]
    ours = torch.autograd.grad([(a * b).sum() for a, b in zip(ours_scores, weights, strict=True)], embedded)
    for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert _error(ours_scores[row], scores[row]) < FURTHEST
        assert _error(one, other) < FURTHEST


@pytest.mark.parametrize(
    "held", [{}, {"dtype": torch.bfloat16}, {"quant": "int8"}, {"quant": "nf4"}], ids=["fp32", "bf16", "int8", "nf4"]
)
@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "gemma2"])
def test_to_compute_blocks_again_changes_no_bit(case: str, held: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    executor = load_executor(open_saved(tmp_path), Span(1, BLOCKS), KV_TOKENS, **held)
    sequences = [_drawn(length, HIDDEN_SIZE, seed=length) for length in LENGTHS]
    wanted = [_drawn(length, HIDDEN_SIZE, seed=-length) for length in LENGTHS]
    row = torch.cat(sequences).requires_grad_()
    token = segments_of_forward.set([Segment(NoKV(), 0, length) for length in LENGTHS])
    try:
        output = executor.model(executor.span, row, torch.cat([torch.arange(length) for length in LENGTHS]))
    finally:
        segments_of_forward.reset(token)
    (expected,) = torch.autograd.grad(output, row, torch.cat(wanted))
    outputs = outputs_of(executor.model, executor.span, sequences)
    gradients = gradients_of(executor.model, executor.span, sequences, wanted).states
    assert torch.equal(torch.cat(outputs), output)
    assert torch.equal(torch.cat(gradients), expected)
    assert expected.isfinite().all()
    assert expected.norm() > 1


@pytest.mark.parametrize("case", ["llama", "bloom"])
def test_sequences_do_not_change_each_other(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    executor = load_executor(open_saved(tmp_path), Span(0, 2), KV_TOKENS)
    sequences = [_drawn(length, HIDDEN_SIZE, seed=length) for length in LENGTHS]
    together = gradients_of(executor.model, executor.span, sequences, sequences).states
    for sequence, gradient in zip(sequences, together, strict=True):
        (alone,) = gradients_of(executor.model, executor.span, [sequence], [sequence]).states
        assert _error(gradient, alone) < FURTHEST


@pytest.mark.parametrize("kind", [Int8Linear, NF4Linear], ids=["int8", "nf4"])
def test_gradients_go_through_quantized_weights_as_they_are(kind: type[Int8Linear | NF4Linear]) -> None:
    layer = kind(_drawn(40, 128), _drawn(40))
    rows = _drawn(7, 128, seed=2)
    rows[3, 5] = 50.0  # an outlier
    weights = layer(torch.eye(128)) - layer.bias  # each input once, which 8 bits hold exactly
    gradient = _drawn(7, 40, seed=3)
    (ours,) = torch.autograd.grad(layer(rows.requires_grad_()), rows, gradient)
    assert _error(ours, gradient @ weights.T) < FURTHEST


@pytest.mark.parametrize("levels", [16, 255], ids=["4 bits", "8 bits"])
def test_gradients_go_through_weights_in_fewer_bits(levels: int) -> None:
    plain = torch.nn.Linear(128, 40).requires_grad_(False)
    plain.weight.copy_((torch.arange(40 * 128).view(40, 128) * 17 % levels - levels // 2) * 0.125)
    narrow = found_narrow(plain)
    assert narrow is not None
    rows, gradient = _drawn(9, 128).requires_grad_(), _drawn(9, 40, seed=3)
    (ours,), (theirs,) = (torch.autograd.grad(layer(rows), rows, gradient) for layer in (narrow, plain))
    assert torch.equal(ours, theirs)


def test_an_executor_does_passes_of_several_clients_together(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    executor = load_executor(open_saved(tmp_path), Span(0, 3), KV_TOKENS)
    span = Span(1, 3)
    sequences = [_drawn(length, HIDDEN_SIZE, seed=length) for length in LENGTHS]
    wanted = [_drawn(length, HIDDEN_SIZE, seed=-length) for length in LENGTHS]
    hidden, gradient = ([to_bytes(each) for each in numbers] for numbers in (sequences, wanted))
    passes = [Evaluate(span, (LENGTHS[0], LENGTHS[1]), b"".join(hidden[:2])), Evaluate(span, LENGTHS[2:], hidden[2])]
    outputs = torch.cat([from_bytes(each, HIDDEN_SIZE) for each in executor.run(passes)])
    assert torch.equal(outputs, torch.cat(outputs_of(executor.model, span, sequences)))
    back = [Backward(span, each.lengths, each.hidden, b"") for each in passes]
    back = [replace(back[0], gradient=b"".join(gradient[:2])), replace(back[1], gradient=gradient[2])]
    gradients = torch.cat([from_bytes(each, HIDDEN_SIZE) for each in executor.run(back)])
    assert torch.equal(gradients, torch.cat(gradients_of(executor.model, span, sequences, wanted).states))
    for wrong in (replace(back[0], gradient=gradient[0]), replace(back[0], span=Span(2, 4))):
        with pytest.raises(LocalProtocolError):
            executor.run([wrong])
