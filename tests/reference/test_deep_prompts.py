"""Deep prompts in an executor: outputs and gradients are those of autograd, which adds them in the plain way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import pad

from llmnode.compute.gradients import _Row
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SessionId
from llmnode.core.operations import NO_PROMPTS, Backward, DeepPrompts, Evaluate, Fork, Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.tensors import from_bytes, to_bytes
from reference.paged import load_paged
from reference.small import HIDDEN_SIZE, KV_TOKENS, open_saved, save_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor

pytestmark = pytest.mark.reference

SPAN = Span(1, 4)
LENGTHS = ((6,), (9, 4), (5, 11))
"""The lengths of the sequences of each pass."""
ROWS = (None, 1, 2)
"""The rows of prompts of each pass."""
POSITIONS = 4


def _drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _plain(executor: SpanExecutor, states: torch.Tensor, lengths: tuple[int, ...], prompts: Any) -> torch.Tensor:
    for index, block in enumerate(range(SPAN.start, SPAN.end)):
        if prompts is not None:
            rows = zip(prompts[index].expand(len(lengths), -1, -1), lengths, strict=True)
            states = states + torch.cat([pad(own, (0, 0, 0, length - POSITIONS)) for own, length in rows])
        row = _Row(executor.model, states.split(lengths))
        states = row.through(Span(block, block + 1), states)
    return states


@pytest.mark.parametrize(
    ("case", "held"),
    [
        *((case, {}) for case in ("llama", "gpt2", "bloom", "gemma2")),
        ("llama", {"dtype": torch.bfloat16}),
        ("llama", {"quant": "int8"}),
    ],
    ids=str,
)
def test_a_batch_with_and_without_prompts_gives_what_autograd_gives(
    case: str, held: dict[str, Any], tmp_path: Path
) -> None:
    save_model(tmp_path, case, tied=True)
    executor = load_executor(open_saved(tmp_path), Span(0, 5), KV_TOKENS, **held)
    evaluates, backwards, outputs, gradients = [], [], [], []
    for seed, (lengths, rows) in enumerate(zip(LENGTHS, ROWS, strict=True)):
        hidden = _drawn(sum(lengths), HIDDEN_SIZE, seed=seed).requires_grad_()
        wanted = _drawn(sum(lengths), HIDDEN_SIZE, seed=-1 - seed)
        prompts, values = NO_PROMPTS, None
        if rows is not None:
            values = _drawn(len(SPAN), rows, POSITIONS, HIDDEN_SIZE, seed=10 + seed).requires_grad_()
            prompts = DeepPrompts(len(SPAN), rows, POSITIONS, to_bytes(values))
        output = _plain(executor, hidden, lengths, values)
        outputs.append(output.detach())
        trained = [hidden] if values is None else [hidden, values]
        found = torch.autograd.grad(output, trained, wanted)
        gradients.append(torch.cat([each.flatten() for each in found]))
        evaluates.append(Evaluate(SPAN, lengths, to_bytes(hidden), prompts=prompts))
        backwards.append(Backward(SPAN, lengths, to_bytes(hidden), to_bytes(wanted), prompts=prompts))
    furthest = 1e-5 if held.get("dtype") is None else 0.02  # bf16 rounds batches of other shapes otherwise
    for expected, found in ((outputs, executor.run(evaluates)), (gradients, executor.run(backwards))):
        for theirs, ours in zip(expected, found, strict=True):
            error = (from_bytes(ours, 1).flatten() - theirs.flatten()).norm() / theirs.norm()
            assert error < furthest


@pytest.mark.parametrize("load", [load_executor, load_paged], ids=["plain", "pages"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_session_adds_its_prompts_whatever_its_slices_are(
    case: str, load: Callable[..., SpanExecutor], tmp_path: Path
) -> None:
    """Beside one without prompts, through some blocks at a time, and after a rollback and a copy."""
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    executor = load(folder, Span(0, 5), **({"kv_tokens": KV_TOKENS} if load is load_executor else {}))
    prompted, plain, copy = (SessionId(bytes([number]) * 16) for number in range(3))
    values = _drawn(len(SPAN), 1, POSITIONS, HIDDEN_SIZE, seed=1)
    prompts = DeepPrompts(len(SPAN), 1, POSITIONS, to_bytes(values))
    for session, own in ((prompted, prompts), (plain, NO_PROMPTS), (copy, prompts)):
        executor.apply(Open(session, SPAN, 32, prompts=own))
    hidden = _drawn(10, HIDDEN_SIZE, seed=2)
    whole = [_plain(executor, hidden, (10,), own) for own in (values, None)]

    def run(session: SessionId, start: int, stop: int, **part: int) -> Slice:
        return Slice(session, start, stop - start, b"" if part.get("first") else to_bytes(hidden[start:stop]), **part)

    found = []
    for start, end in ((0, 1), (1, 3), (3, 9)):
        both = executor.forward([run(prompted, start, end), run(plain, start, end)])
        found.append([from_bytes(each, HIDDEN_SIZE) for each in both])
    for theirs, ours in zip(whole, zip(*found, strict=True), strict=True):
        assert (torch.cat(ours) - theirs[:9]).norm() / theirs.norm() < 1e-5
    executor.apply(Truncate(prompted, 2))
    executor.apply(Fork(copy, prompted, 0, 2))
    for session in (prompted, copy):
        assert not len(executor.forward([run(session, 2, 6, end=1)])[0])
        (rest,) = executor.forward([run(session, 2, 6, first=1)])
        assert (from_bytes(rest, HIDDEN_SIZE) - whole[0][2:6]).norm() / whole[0].norm() < 1e-5
