"""Attention of BLOOM and Falcon, to which transformers gives code of their own, without its `AttentionInterface`.

Only that is replaced here, by the same over `ragged_attention`; the rest of their blocks is transformers'. Queries,
keys and values come out of one product, as each family lays them out. For Falcon the KV has the few heads that keys and
values have in the model, and not a copy for each head of queries.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from llmnode.compute.attention import ragged_attention, segments_now

if TYPE_CHECKING:
    from collections.abc import Callable

_ALIBI_STEP = 1024
"""ALiBi is made for a multiple of this many positions, and anew when a sequence outgrows it."""


def replace_own_attention(model: torch.nn.Module) -> None:
    """Replace the attention in all blocks of `model`, if it is of such a family."""
    forwards: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom, "FalconAttention": _falcon}
    for module in model.modules():
        if (forward := forwards.get(type(module).__name__)) is not None:
            setattr(module, "forward", partial(forward, module))  # noqa: B010 - mypy knows forward as a method


def _bloom(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **_unused: Any
) -> tuple[torch.Tensor, None]:  # Any: transformers' own, and not typed
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    bias = _alibi("bloom", module.num_heads, hidden_states)
    attended, _ = ragged_attention(module, query, key, value, None, module.inv_norm_factor, key_bias=bias)
    return residual + module.dense(attended.flatten(2)), None


def _falcon(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_unused: Any,
) -> tuple[torch.Tensor, None]:  # Any: likewise
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = (heads.transpose(1, 2) for heads in _split(module, module.query_key_value(hidden_states)))
    bias = None
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        bias = _alibi("falcon", module.num_heads, hidden_states) * module.inv_norm_factor
    attended, _ = ragged_attention(module, query, key, value, None, module.inv_norm_factor, key_bias=bias)
    return module.dense(attended.flatten(2)), None


def _split(module: Any, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # Any: likewise
    """(1, tokens, outputs) to queries, keys and values (1, tokens, heads of each, head_dim)."""
    if not module.new_decoder_architecture:
        query, key, value = module._split_heads(fused)
        return query, key, value
    # In groups: the queries that share a head of keys and values, and these two. transformers copies them for each.
    groups = fused.view(*fused.shape[:2], module.num_kv_heads, -1, module.head_dim)
    return groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]


def _alibi(family: str, heads: int, like: torch.Tensor) -> torch.Tensor:
    """(heads, positions) for all that the sequences of this forward look at: each family rounds it in its own way."""
    end = max(segment.start + segment.length for segment in segments_now())
    return _made_alibi(family, heads, -(-end // _ALIBI_STEP) * _ALIBI_STEP, like.dtype, like.device)


@lru_cache(maxsize=4)
def _made_alibi(family: str, heads: int, positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon

    build = modeling_bloom.build_alibi_tensor if family == "bloom" else modeling_falcon.build_alibi_tensor
    with torch.inference_mode(mode=False):  # or gradients could not use it later
        alibi: torch.Tensor = build(torch.ones(1, positions, dtype=torch.long, device=device), heads, dtype)
        return alibi[:, 0]
