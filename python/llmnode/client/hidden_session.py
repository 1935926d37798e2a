"""Petals' primitive for synchronous code: hidden states through all blocks, with rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from llmnode.client.cache import SessionCache


class HiddenSession:
    """Hidden states through all blocks, position by position."""

    def __init__(self, cache: SessionCache) -> None:
        self._cache = cache

    @property
    def position(self) -> int:
        """Positions behind us. Set a lower one to roll back to it."""
        return self._cache.columns

    @position.setter
    def position(self, position: int) -> None:
        self._cache.truncate(position)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (rows, tokens, hidden_size) fp32, as it leaves the embedding. Returns it after the last block."""
        rows, size = self._cache.rows, self._cache.hidden_size
        if hidden.dim() != 3 or (hidden.shape[0], hidden.shape[2]) != (rows, size) or not hidden.shape[1]:
            raise ConfigError(f"hidden states of shape {tuple(hidden.shape)}: expected ({rows}, tokens, {size})")
        if self._cache.prefix or self._cache.prefix_due is not None:
            raise ConfigError("this session begins with trained prompts, and takes tokens: use generate")
        self._cache.settled()
        columns = hidden.shape[1]
        self._cache.grow_to(self.position + columns)
        outputs = self._cache.run_rows([row.detach().float() for row in hidden])
        self._cache.add_columns(torch.ones(len(hidden), columns, dtype=torch.bool))
        return torch.stack([output for output in outputs if output is not None])
