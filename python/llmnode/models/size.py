"""How much memory a model takes, from its config alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llmnode.models.families import family_of

if TYPE_CHECKING:
    from llmnode.models.folder import ModelFolder

MEMORY_SHARE = 0.8
"""Of what is free, a server takes this much: other programs grow too."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """In the dtype that it was asked for. `kv_token_bytes` are of one position in one block."""

    blocks: int
    block_bytes: int
    ends_bytes: int
    kv_token_bytes: int

    def fitting_blocks(self, free_bytes: int, kv_tokens: int) -> int:
        """How many blocks a server has room for in its share of what is free, with all its KV in use."""
        return min(self.blocks, int(MEMORY_SHARE * free_bytes) // (self.block_bytes + kv_tokens * self.kv_token_bytes))


def measure_size(folder: ModelFolder, dtype: torch.dtype = torch.float32) -> ModelSize:
    """Reads no tensor. Raises ModelError for a family that is not supported."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    family = family_of(folder.config)
    config = copy.deepcopy(folder.config)  # transformers writes into it
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    blocks = [0] * folder.info.blocks
    ends = 0
    for name, parameter in model.named_parameters():
        if name.startswith(family.block_prefix):
            blocks[int(name.removeprefix(family.block_prefix).partition(".")[0])] += parameter.nbytes
        else:
            ends += parameter.nbytes
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSize(len(blocks), max(blocks), ends, kv_token_bytes=2 * heads * head_dim * dtype.itemsize)
