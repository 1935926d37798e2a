"""How much memory a model takes, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmnode.core.model import SAME
from llmnode.errors import ConfigError
from llmnode.models.blueprint import blueprint_of
from llmnode.models.families import family_of, kv_heads
from llmnode.models.fused import join_products, make_block
from llmnode.models.native import takes_narrow
from llmnode.models.parts import found_block_bytes, tensor_bytes
from llmnode.models.quantized import quantized_bytes
from llmnode.models.skeleton import without_weights
from llmnode.models.stored import block_dtypes

if TYPE_CHECKING:
    from llmnode.models.folder import ModelFolder

_MOST_POSITIONS = 2**32 - 1
"""What an announcement can say."""
_SCALE_BYTES = 4
"""Of KV in 8 bits, for each position and head."""
MEMORY_SHARE = 0.8
"""Of what is free, a server takes this much: other programs grow too."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """In the precision that it was asked for. `kv_token_bytes` are of one position in one block.

    `log_token_bytes` are of what a server puts out for one position, in float32, and logs for as long as it has the KV.
    """

    blocks: int
    block_bytes: int
    ends_bytes: int
    kv_token_bytes: int
    log_token_bytes: int = 0

    def fitting_blocks(self, free_bytes: int, kv_tokens: int) -> int:
        """How many blocks a server has room for in its share of what is free, with all its KV in use."""
        return min(self.blocks, int(MEMORY_SHARE * free_bytes) // (self.block_bytes + kv_tokens * self.kv_token_bytes))

    def fitting_blocks_beside(self, free_bytes: int, kv_bytes: int) -> int:
        """As `fitting_blocks`, where all KV together takes so much."""
        return max(0, min(self.blocks, (int(MEMORY_SHARE * free_bytes) - kv_bytes) // self.block_bytes))

    def fitting_blocks_apart(self, free_bytes: int, kv_free_bytes: int, kv_tokens: int) -> int:
        """As `fitting_blocks`, where KV is on another device than the blocks."""
        with_kv = int(MEMORY_SHARE * kv_free_bytes) // (kv_tokens * self.kv_token_bytes)
        return min(with_kv, self.fitting_blocks_beside(free_bytes, 0))

    def kv_tokens(self, free_bytes: int, kv_bytes: int, blocks: int, *, apart: bool = False) -> int:
        """For how many positions of so many blocks, with what is logged of each, `kv_bytes` are enough.

        Raises ConfigError if it is none, or if there is not so much of what is free where KV is: beside the blocks,
        unless it is `apart` from them.
        """
        weights = 0 if apart else blocks * self.block_bytes
        token_bytes = blocks * self.kv_token_bytes + self.log_token_bytes
        if weights + kv_bytes > free_bytes:
            taken = "" if apart else f", of which {blocks} blocks take {weights >> 20}"
            raise ConfigError(
                f"{kv_bytes >> 20} MiB of KV do not fit: {free_bytes >> 20} MiB are free{taken}: "
                "lower --kv-memory, or serve fewer --blocks"
            )
        if kv_bytes < token_bytes:
            raise ConfigError(f"{kv_bytes} bytes of KV hold no position of {blocks} blocks, which takes {token_bytes}")
        return min(kv_bytes // token_bytes, _MOST_POSITIONS)


def measure_size(
    folder: ModelFolder,
    dtype: torch.dtype = torch.float32,
    quant: str = "none",
    kv_dtype: str = SAME,
    device: str = "cpu",
) -> ModelSize:
    """Reads no tensor, but of weights that need fewer bits than files have: `found_block_bytes`.

    The ends may take less. Raises ModelError for a family that is not supported, or not with its weights quantized.
    """
    found_bytes: int | None = None
    if (blueprint := blueprint_of(folder)) is not None:
        is_narrow = takes_narrow(blueprint, dtype, device, quant)
        found_bytes = found_block_bytes(folder) if is_narrow else None
        blocks = []
        for index, plan in enumerate(blueprint.blocks):
            dtypes = block_dtypes(folder, index, plan, dtype, halves=is_narrow)
            blocks.append(make_block(plan, index, blueprint.activation, dtypes))
            join_products(blocks[-1])
        ends_bytes, head_dim = blueprint.ends * dtype.itemsize, blueprint.blocks[0].head_dim
        heads = blueprint.blocks[0].shapes["self_attn.k_proj.weight"][0] // head_dim
    else:
        family, config = family_of(folder.config), folder.config
        model = without_weights(folder, family, "eager", dtype)
        blocks = getattr(model.get_submodule(family.decoder), family.blocks)
        ends_bytes = sum(
            parameter.nbytes for name, parameter in model.named_parameters() if not name.startswith(family.block_prefix)
        )
        head_dim, heads = _head_dim(config), kv_heads(config)
    block_bytes = [tensor_bytes(block) if quant == "none" else quantized_bytes(block, quant) for block in blocks]
    head_bytes = head_dim * dtype.itemsize if kv_dtype == SAME else head_dim + _SCALE_BYTES
    largest = found_bytes or max(block_bytes)
    return ModelSize(len(blocks), largest, ends_bytes, 2 * heads * head_bytes, 4 * folder.info.hidden_size)


def _head_dim(config: Any) -> int:  # Any: each family's config has attributes of its own
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
