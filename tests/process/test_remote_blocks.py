"""`model.remote_blocks`: gradients through blocks on real servers are those of the whole model in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode
from llmnode.core.span import Span
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from process.conftest import Node

pytestmark = [pytest.mark.process, pytest.mark.slow]

TEXTS = ["Hello, my name is", "Once upon a time there was a king who", "1 2 3"]
FURTHEST = 1e-5


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def _theirs(
    whole: Any,
    span: Span,
    hidden: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    prompts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of a weighted sum of what blocks of transformers put out, row by row without padding.

    They are for `hidden`, and for deep prompts (blocks, 1, positions, hidden_size).
    """
    losses = []
    for row, seen, weight in zip(hidden, mask.bool(), weights, strict=True):
        states, positions = row[seen][None], torch.arange(int(seen.sum()))[None]
        turns = whole.model.rotary_emb(states, positions)
        causal = torch.full((1, 1, positions.shape[1], positions.shape[1]), float("-inf")).triu(1)
        for index, block in enumerate(whole.model.layers[span.start : span.end]):
            if prompts is not None:
                count = prompts.shape[2]
                states = torch.cat([states[:, :count] + prompts[index], states[:, count:]], dim=1)
            states = block(states, attention_mask=causal, position_embeddings=turns, position_ids=positions)
            states = states[0] if isinstance(states, tuple) else states
        losses.append((states[0] * weight[seen]).sum())
    return torch.autograd.grad(torch.stack(losses).sum(), [hidden] if prompts is None else [hidden, prompts])


def _embedded(whole: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = whole.get_input_embeddings()(tokens).detach().requires_grad_()
    return hidden


@pytest.mark.parametrize("span", [Span(0, 30), Span(3, 20), Span(29, 30)], ids=["all", "some", "one"])
def test_gradients_are_those_of_one_process(
    span: Span, model: Any, transformers_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmnode.session.passes.MOST_POSITIONS", 12)  # so there are microbatches
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    mask = inputs.attention_mask
    hidden = _embedded(transformers_model, inputs.input_ids)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    blocks = model.remote_blocks[span.start : span.end]
    assert len(blocks) == len(span)
    (ours,) = torch.autograd.grad((blocks(hidden, mask) * weights)[mask.bool()].sum(), hidden)
    (theirs,) = _theirs(transformers_model, span, hidden, mask, weights)
    assert _error(ours, theirs) < FURTHEST
    assert not ours[~mask.bool()].any()


def test_a_backward_goes_through_another_server_if_that_of_its_forward_is_gone(
    transformers_model: Any, tokenizer: Any, start_servers: Callable[..., list[Node]]
) -> None:
    (rest,) = start_servers([Span(3, 30)])
    twins = start_servers([Span(0, 3)] * 2, peers=[rest.address])
    tokens = tokenizer(TEXTS[:1], return_tensors="pt")
    hidden = _embedded(transformers_model, tokens.input_ids)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    prompts = torch.randn(3, 1, 2, hidden.shape[2], generator=torch.Generator().manual_seed(3)).requires_grad_()
    with llmnode.connect(peers=[rest.address]) as model:
        (used,) = {hop.peer for hop in model.route} - {rest.ready["peer"]}
        output = model.remote_blocks[:3](hidden, tokens.attention_mask, prompts)
        (gone,) = [node for node in twins if node.ready["peer"] == used]
        gone.process.kill()
        gone.process.wait()
        ours = torch.autograd.grad((output * weights).sum(), [hidden, prompts])
    theirs = _theirs(transformers_model, Span(0, 3), hidden, tokens.attention_mask, weights, prompts)
    for one, other in zip(ours, theirs, strict=True):
        assert _error(one, other) < FURTHEST


def test_prompts_of_peft_have_the_losses_and_gradients_of_one_process(
    model: Any, transformers_model: Any, tokenizer: Any
) -> None:
    """Their gradients deviate by no more than four times as much as those of one process do without padding."""
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    texts = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    padded, alone = (_prompt_gradient(transformers_model, inputs) for inputs in ([batch], texts))
    ours = _prompt_gradient(model, [batch])
    assert _error(ours[0], padded[0]) < FURTHEST
    deviation = _error(alone[1], padded[1])
    assert 0 < deviation < 1e-4
    assert _error(ours[1], padded[1]) < 4 * deviation


def _prompt_gradient(base: Any, batches: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of all tokens, and the gradient of a soft prompt."""
    torch.manual_seed(1)
    prompted = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6))
    losses = []
    for inputs in batches:
        labels = inputs.input_ids.masked_fill(inputs.attention_mask == 0, -100)
        losses.append(prompted(**inputs, labels=labels).loss * inputs.attention_mask.sum())
    loss = torch.stack(losses).sum() / sum(inputs.attention_mask.sum() for inputs in batches)
    loss.backward()
    (prompt,) = [each for each in prompted.parameters() if each.requires_grad]
    return loss, prompt.grad


def test_a_soft_prompt_learns_by_a_loop_of_pytorch(model: Any, tokenizer: Any) -> None:
    """Prompt tuning (Lester et al. 2021): the loss falls, and only the prompt changes."""
    tokens = tokenizer(["The capital of France is Paris"], return_tensors="pt").input_ids
    embedded = model.get_input_embeddings()(tokens).detach()
    torch.manual_seed(1)
    prompt = (0.02 * torch.randn(1, 4, embedded.shape[2])).requires_grad_()
    target = torch.randn(embedded.shape[2])
    optimizer = torch.optim.Adam([prompt], lr=0.05)
    losses = []
    for _ in range(5):
        output = model.remote_blocks[:6](torch.cat([prompt, embedded], dim=1))
        loss = 1 - torch.cosine_similarity(output[0, -1], target, dim=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


def test_what_does_not_fit_is_refused_before_it_is_sent(model: Any) -> None:
    blocks = model.remote_blocks
    for wrong in (torch.zeros(3, 576), torch.zeros(1, 2, 575), torch.zeros(1, 0, 576)):
        with pytest.raises(ConfigError, match="expected"):
            blocks(wrong)
    with pytest.raises(ConfigError, match="attention mask"):
        blocks(torch.zeros(1, 2, 576), torch.ones(1, 3))
    with pytest.raises(ConfigError, match="context"):
        blocks(torch.zeros(1, 9000, 576))
    for wrong in ((29, 1, 2, 576), (30, 1, 2, 575), (30, 2, 576), (30, 2, 2, 576), (30, 1, 4, 576), (30, 1, 0, 576)):
        with pytest.raises(ConfigError, match="prompts"):
            blocks(torch.zeros(3, 5, 576), torch.ones(3, 5).tril(2), torch.zeros(wrong))
    for empty in (slice(3, 3), slice(0, 10, 2)):
        with pytest.raises(ConfigError, match="blocks"):
            blocks[empty]
    with pytest.raises(IndexError):
        blocks[30]
    assert blocks[-1].span == Span(29, 30)
    assert not blocks(torch.zeros(1, 2, 576), torch.zeros(1, 2)).any()
