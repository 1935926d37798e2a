"""Deep prompts in a forward: what some sequences add to their first positions, before each block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.models.tensors import from_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import DeepPrompts


class PromptedSequences:
    """Sequences that begin in the rows `starts` of a forward, and their prompts before the blocks from `first` on."""

    def __init__(self, values: torch.Tensor, first: int, starts: Sequence[int]) -> None:
        """values: (blocks, rows, positions, hidden_size), with one row for all sequences, or one for each."""
        self._values, self._first = values, first
        rows = torch.tensor([*starts])[:, None] + torch.arange(values.shape[2])
        self._rows = rows.to(values.device)  # (sequences, positions)

    def add(self, block: int, states: torch.Tensor) -> torch.Tensor:
        """`states`, (tokens, hidden_size), with the prompts before a block of the model."""
        prompts = self._values[block - self._first].expand(len(self._rows), -1, -1)
        return states.index_add(0, self._rows.flatten(), prompts.flatten(0, 1))

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradients for the prompts before a block, flat, from those for the states that they were added to."""
        found = gradient[self._rows]
        if self._values.shape[1] == 1:
            found = found.sum(0)
        return found.flatten()


def read_prompts(prompts: DeepPrompts, hidden_size: int, device: torch.device) -> torch.Tensor:
    """Their values, (blocks, rows, positions, hidden_size)."""
    values = from_bytes(prompts.values, hidden_size).to(device)
    return values.view(prompts.blocks, prompts.rows, prompts.positions, hidden_size)


def prompted(all_prompts: Sequence[PromptedSequences], block: int, states: torch.Tensor) -> torch.Tensor:
    """`states` with all prompts before a block of the model."""
    for each in all_prompts:
        states = each.add(block, states)
    return states
