"""Trainable prompts that a client puts before every text ("ptune"), and adds before each block too ("deep_ptune").

Names and shapes are Petals'. The prompts are parameters of the client's part of the model; servers keep none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.errors import ConfigError
from llmnode.models.tensors import to_bytes
from llmnode.wire.deep_prompts import most_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping

PTUNE, DEEP_PTUNE = MODES = "ptune", "deep_ptune"
PROMPTS, DEEP_PROMPTS = MODULES = "prompt_embeddings", "intermediate_prompt_embeddings"
"""The modules of a decoder that has prompts."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model: embeddings, hidden states, blocks and context. `deviation` is that of new weights."""

    embedding: int
    hidden: int
    blocks: int
    context: int
    deviation: float


def make_prompts(tuning_mode: str, pre_seq_len: int, sizes: Sizes) -> Mapping[str, torch.nn.Embedding]:
    """New prompts, in fp32, by their names. Raises ConfigError for an unknown mode, or prompts that do not fit."""
    if tuning_mode not in MODES:
        raise ConfigError(f"there is no tuning_mode {tuning_mode!r}: choose one of {', '.join(MODES)}")
    if type(pre_seq_len) is not int or not 1 <= pre_seq_len < sizes.context:
        raise ConfigError(f"pre_seq_len is {pre_seq_len!r}: with {tuning_mode} give 1 to {sizes.context - 1}")
    widths = {PROMPTS: sizes.embedding}
    if tuning_mode == DEEP_PTUNE:
        if (most := most_prompts(FP32_BYTES * sizes.hidden)) < pre_seq_len:
            raise ConfigError(f"pre_seq_len is {pre_seq_len}: servers take {most} prompts before a block of this model")
        widths[DEEP_PROMPTS] = sizes.blocks * sizes.hidden
    made = {name: torch.nn.Embedding(pre_seq_len, width, dtype=torch.float32) for name, width in widths.items()}
    for module in made.values():
        torch.nn.init.normal_(module.weight, std=sizes.deviation)
    return made


def copied_prompts(prompts: torch.Tensor) -> DeepPrompts:
    """The numbers of `prompts` (blocks, rows, positions, hidden_size) in fp32, as they are now."""
    blocks, rows, positions, _ = prompts.shape
    return DeepPrompts(blocks, rows, positions, to_bytes(prompts.detach().clone()))


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prompts as they are now.

    `embedded` is (positions, embedding size), and stands for embeddings of tokens. `deep` is (blocks, 1, positions,
    hidden_size), and is added before each block; None with "ptune".
    """

    embedded: torch.Tensor
    deep: torch.Tensor | None

    @classmethod
    def of(cls, prompts: torch.nn.Module, deep: torch.nn.Module | None, hidden_size: int) -> Self:
        """The prefix that the modules of `make_prompts` give."""
        positions = torch.arange(int(prompts.num_embeddings))  # type: ignore[arg-type]  # torch types attributes widely
        if deep is None:
            return cls(prompts(positions), None)
        return cls(prompts(positions), deep(positions).unflatten(1, (-1, hidden_size)).transpose(0, 1)[:, None])

    @property
    def positions(self) -> int:
        return len(self.embedded)

    def deep_now(self) -> DeepPrompts:
        """A copy of the numbers that are added before blocks, for a session."""
        return NO_PROMPTS if self.deep is None else copied_prompts(self.deep)


@dataclass(frozen=True, slots=True)
class Prefixed:
    """A batch whose rows have a prefix before their first real column. All are (rows, positions + columns, ...)."""

    embedded: torch.Tensor
    real: torch.Tensor
    position_ids: torch.Tensor
    places: torch.Tensor
    """(rows, columns): where the columns of the batch are now."""

    @classmethod
    def of(cls, prefix: Prefix, embedded: torch.Tensor, real: torch.Tensor, position_ids: torch.Tensor) -> Self:
        """embedded: (rows, columns, size); real, position_ids: (rows, columns).

        Tokens count on from the prefix, whose positions begin with 0. A row of padding alone stays that.
        """
        rows, columns = real.shape
        count, every = prefix.positions, torch.arange(prefix.positions + columns)
        first = real.int().argmax(dim=1)[:, None]
        sources = every.where(every >= first + count, (every - first).where(every >= first, every + count))
        whole = torch.cat([prefix.embedded.expand(rows, -1, -1), embedded], dim=1)
        ids = torch.cat([torch.arange(count).expand(rows, -1), position_ids + count], dim=1)
        is_real = torch.cat([real.any(dim=1, keepdim=True).expand(-1, count), real], dim=1)
        column = torch.arange(columns)
        return cls(
            whole[torch.arange(rows)[:, None], sources],
            is_real.gather(1, sources),
            ids.gather(1, sources),
            column + count * (column >= first),
        )

    def columns_of(self, states: torch.Tensor) -> torch.Tensor:
        """The columns of the batch, of `states` (rows, positions + columns, size)."""
        return states[torch.arange(len(states))[:, None], self.places]
