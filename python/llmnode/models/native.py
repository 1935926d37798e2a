"""Blocks of the Llama kind in Rust (`transport_rs/src/blocks`), for forwards of a few positions: decodes, above all.

Such a forward should take as long as its weights take from memory. What torch does between one product and the next,
some forty calls a block, all out of the caches by then, took 0.3 to 0.5 of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmnode._native import LlamaBlocks
from llmnode.models.fused import ACTIVATIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmnode._native import _LlamaBlock
    from llmnode.models.fused import Rotary

    Floats = NDArray[np.float32]

MOST_POSITIONS = 32
"""From so many on BLAS is faster, which lays weights out anew first."""


@dataclass(frozen=True, slots=True)
class NativeBlocks:
    """`no_kv`, (1, kv_heads, 0, head_dim), is what keys and values of no position look like."""

    blocks: LlamaBlocks
    no_kv: torch.Tensor


def native_blocks(blocks: torch.nn.ModuleList, rotary: Rotary) -> NativeBlocks | None:
    """The same blocks over the same memory, on torch's number of threads; None if they are of another kind.

    That is: not fp32 on a CPU, quantized, of another activation than SiLU, or of sizes that vectors do not fit.
    """
    if not all(_is_plain(each) for each in blocks):
        return None
    first: Any = blocks[0]
    attention, norm = first.self_attn, first.input_layernorm
    heads, kv_heads = attention.heads
    try:
        native = LlamaBlocks(
            [_weights(each) for each in blocks],
            hidden=len(norm.weight),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            inner=first.mlp.down_proj.in_features,
            epsilon=norm.variance_epsilon,
            frequencies=rotary.frequencies.tolist(),
            rotary_scaling=rotary.scaling,
            threads=torch.get_num_threads(),
        )
    except ValueError:  # a size that is no multiple of what it takes at a time
        return None
    return NativeBlocks(native, torch.empty(1, kv_heads, 0, attention.head_dim))


def _is_plain(block: Any) -> bool:  # Any: a module has what its block has
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    are_linear = all(type(block.get_submodule(name)) is torch.nn.Linear for name in names)
    are_floats = all(each.dtype == torch.float32 and each.device.type == "cpu" for each in block.parameters())
    return are_linear and are_floats and block.mlp.act_fn is ACTIVATIONS["silu"]


def _weights(block: Any) -> _LlamaBlock:  # Any: likewise
    own, mlp = block.self_attn, block.mlp
    return {
        "attended_norm": _floats(block.input_layernorm.weight),
        "qkv": _floats(own.qkv_proj.weight),
        "qkv_bias": _optional(own.qkv_proj.bias),
        "head_norms": (_floats(own.q_norm.weight), _floats(own.k_norm.weight)) if hasattr(own, "q_norm") else None,
        "output": _floats(own.o_proj.weight),
        "output_bias": _optional(own.o_proj.bias),
        "fed_norm": _floats(block.post_attention_layernorm.weight),
        "gate_up": _floats(mlp.gate_up_proj.weight),
        "gate_up_bias": _optional(mlp.gate_up_proj.bias),
        "down": _floats(mlp.down_proj.weight),
        "down_bias": _optional(mlp.down_proj.bias),
        "scaling": own.scaling,
        "is_rotated": own.use_rope,
        "window": own.sliding_window,
    }


def _floats(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().contiguous().numpy()
    return array


def _optional(tensor: torch.Tensor | None) -> Floats | None:
    return None if tensor is None else _floats(tensor)
