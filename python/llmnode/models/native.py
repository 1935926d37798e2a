"""Blocks of the Llama kind in Rust (`transport_rs/src/blocks`), for forwards of a few positions: decodes, above all.

Such a forward should take as long as its weights take from memory. What torch does between one product and the next,
some forty calls a block, all out of the caches by then, took 0.3 to 0.5 of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmnode._native import LlamaBlocks
from llmnode.models.fused import ACTIVATIONS, Norm
from llmnode.models.quantized import Int8Linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llmnode._native import _LlamaBlock, _Weight
    from llmnode.models.fused import Rotary

MOST_POSITIONS = 32
"""For more of one sequence BLAS is as fast, which lays weights out anew first."""


@dataclass(frozen=True, slots=True)
class NativeBlocks:
    """`no_kv`, (1, kv_heads, 0, head_dim), is what keys and values of no position look like."""

    blocks: LlamaBlocks
    no_kv: torch.Tensor


def are_few(lengths: Sequence[int]) -> bool:
    """Whether a forward of so many positions of each sequence is faster in Rust: all that are of decodes alone."""
    return sum(lengths) <= MOST_POSITIONS or max(lengths) == 1


def native_blocks(blocks: torch.nn.ModuleList, rotary: Rotary) -> NativeBlocks | None:
    """The same blocks over the same memory, on torch's number of threads; None if they are of another kind.

    That is: not fp32 on a CPU, nor with weights in int8; of another activation than SiLU, of sizes that vectors do not
    fit, or on a processor without any that we know.
    """
    epsilons = {norm.variance_epsilon for norm in blocks.modules() if isinstance(norm, Norm)}
    if not LlamaBlocks.is_fast() or len(epsilons) > 1 or not all(_is_known(each) for each in blocks):
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
            inner=first.mlp.down_proj.weight.shape[1],
            epsilon=norm.variance_epsilon,
            frequencies=rotary.frequencies.tolist(),
            rotary_scaling=rotary.scaling,
            threads=torch.get_num_threads(),
        )
    except ValueError:  # a size that is no multiple of what it takes at a time, or a window of none
        return None
    return NativeBlocks(native, torch.empty(1, kv_heads, 0, attention.head_dim))


def _is_known(block: Any) -> bool:  # Any: a module has what its block has
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    are_linear = all(type(block.get_submodule(name)) in (torch.nn.Linear, Int8Linear) for name in names)
    of_floats = (each for each in block.parameters() if each.dtype != torch.int8)
    are_floats = all(each.dtype == torch.float32 and each.device.type == "cpu" for each in of_floats)
    return are_linear and are_floats and block.mlp.act_fn is ACTIVATIONS["silu"]


def _weights(block: Any) -> _LlamaBlock:  # Any: likewise
    own, mlp = block.self_attn, block.mlp
    return {
        "attended_norm": _array(block.input_layernorm.weight),
        "qkv": _weight(own.qkv_proj),
        "qkv_bias": _bias(own.qkv_proj),
        "head_norms": (_array(own.q_norm.weight), _array(own.k_norm.weight)) if hasattr(own, "q_norm") else None,
        "output": _weight(own.o_proj),
        "output_bias": _bias(own.o_proj),
        "fed_norm": _array(block.post_attention_layernorm.weight),
        "gate_up": _weight(mlp.gate_up_proj),
        "gate_up_bias": _bias(mlp.gate_up_proj),
        "down": _weight(mlp.down_proj),
        "down_bias": _bias(mlp.down_proj),
        "scaling": own.scaling,
        "is_rotated": own.use_rope,
        "window": own.sliding_window,
    }


def _weight(linear: torch.nn.Linear | Int8Linear) -> _Weight:
    codes_or_floats = _array(linear.weight)
    return (codes_or_floats, _array(linear.scale)) if isinstance(linear, Int8Linear) else codes_or_floats


def _bias(linear: torch.nn.Linear | Int8Linear) -> NDArray[np.float32] | None:
    return None if linear.bias is None else _array(linear.bias)


def _array(tensor: torch.Tensor) -> NDArray[Any]:  # Any: of its dtype
    """Over the same memory; a copy of what some file has at an odd place."""
    return np.require(tensor.detach().numpy(), requirements=["C", "A"])
