"""Trainable prompts of Petals over transformers' own model: each row alone, without padding or cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from process.pairs import prompted

if TYPE_CHECKING:
    from collections.abc import Sequence


def weights_of(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copies of a distributed model's prompts, and of those before blocks, (blocks, 1, positions, hidden_size)."""
    own = {name.split(".")[-2]: each for name, each in model.named_parameters()}
    deep = own.get("intermediate_prompt_embeddings")
    size = model.info.hidden_size
    by_block = None if deep is None else deep.detach().clone().unflatten(1, (-1, size)).transpose(0, 1)[:, None]
    return own["prompt_embeddings"].detach().clone(), by_block


def logits_of(alone: Any, tokens: torch.Tensor, prompts: torch.Tensor, deep: torch.Tensor | None) -> torch.Tensor:
    """The scores of `tokens` (length,) after the prompts: (length, vocabulary)."""
    embedded = torch.cat([prompts, alone.get_input_embeddings()(tokens)])[None]
    with nullcontext() if deep is None else prompted(alone, deep):
        logits: torch.Tensor = alone(inputs_embeds=embedded, use_cache=False).logits
    return logits[0, len(prompts) :]


def greedy(alone: Any, tokens: Sequence[int], new: int, prompts: torch.Tensor, deep: torch.Tensor | None) -> list[int]:
    """The tokens that follow."""
    text = [*tokens]
    with torch.no_grad():
        for _ in range(new):
            text.append(int(logits_of(alone, torch.tensor(text), prompts, deep)[-1].argmax()))
    return text[len(tokens) :]
