"""Blocks of the Llama kind in Rust (`transport_rs/src/blocks`), for forwards of a few positions: decodes, above all.

Such a forward should take as long as its weights take from memory. Between one product and the next, torch makes some
forty calls a block, all out of the caches by then: that took 0.3 to 0.5 of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmnode import _native
from llmnode._native import LlamaBlocks
from llmnode.models.layers import ACTIVATIONS, Norm
from llmnode.models.weights.packed_linear import HalfLinear, Q4Linear, Q8Linear
from llmnode.models.weights.quantized import Int8Linear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from llmnode._native import _LlamaBlock, _Update, _Updates, _Weight
    from llmnode.models.blueprint import Blueprint
    from llmnode.models.layers import Rotary
    from llmnode.models.lora import Part, Target
    from llmnode.models.weights.packed_linear import Narrow

    _Linear = torch.nn.Linear | Narrow | Int8Linear

LANES = 16
"""Sizes are multiples of it."""
MOST_POSITIONS = 128
"""For more of one sequence BLAS is as fast, which lays weights out anew first."""
_LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class NativeBlocks:
    """`no_kv` has the form of keys and values without positions: (1, kv_heads, 0, head_dim)."""

    blocks: LlamaBlocks
    no_kv: torch.Tensor


def are_few(lengths: Sequence[int]) -> bool:
    """Whether a forward of sequences of these `lengths` is faster in Rust: it always is for decodes alone."""
    return sum(lengths) <= MOST_POSITIONS or max(lengths) == 1


def takes_narrow(blueprint: Blueprint, dtype: torch.dtype, device: str, quant: str) -> bool:
    """Whether weights may be of fewer bits: only Rust multiplies few rows with those fast. The conditions are those of
    `native_blocks`.
    """
    blocks = blueprint.blocks
    inner = {each.shapes["mlp.down_proj.weight"][1] for each in blocks}
    sizes = {blueprint.hidden_size, *inner, *(each.head_dim for each in blocks)}
    are_known = blueprint.activation == "silu" and len({each.epsilon for each in blocks}) == 1
    are_known = are_known and all(each.window != 0 for each in blocks) and not any(size % LANES for size in sizes)
    return are_known and dtype == torch.float32 and device == "cpu" and quant == "none" and LlamaBlocks.is_fast()


def native_blocks(blocks: torch.nn.ModuleList, rotary: Rotary) -> NativeBlocks | None:
    """The same blocks over the same memory, on torch's number of threads; None if they are of another kind.

    That is: not fp32 on a CPU, whatever its weights are kept as, but for nf4; of another activation than SiLU, of sizes
    that vectors do not fit, or on a processor without any that we know.
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
            inner=first.mlp.inner,
            epsilon=norm.variance_epsilon,
            frequencies=rotary.frequencies.tolist(),
            rotary_scaling=rotary.scaling,
            threads=torch.get_num_threads(),
        )
    except ValueError:  # a size that is not a multiple of its step, or a window of 0
        return None
    return NativeBlocks(native, torch.empty(1, kv_heads, 0, attention.head_dim, dtype=torch.float32))


def native_adapter(parts: Mapping[int, Part], targets: Mapping[int, Mapping[str, Target]]) -> _native.LlamaAdapter:
    """An adapter for `native_blocks`, over the memory of its `parts`, which are by block.

    `targets` are the layers of all blocks that are in Rust, in order.
    """
    return _native.LlamaAdapter([_updates(parts.get(block, {}), of_block) for block, of_block in targets.items()])


def _updates(part: Part, targets: Mapping[str, Target]) -> _Updates:
    found: dict[str, list[_Update]] = {layer: [] for layer in _LAYERS}
    for name, lora in part.items():
        target = targets[name]
        found[target.module].append((target.first, _array(lora.a), _array(lora.b.t()), lora.scale))
    qkv, output, gate_up, down = (found[layer] for layer in _LAYERS)
    return {"qkv": qkv, "output": output, "gate_up": gate_up, "down": down}


def _is_known(block: Any) -> bool:  # Any: a module has the attributes of its block
    linears = [block.get_submodule(name) for name in _LAYERS]
    kinds = (torch.nn.Linear, HalfLinear, Q4Linear, Q8Linear, Int8Linear)
    are_linear = all(type(each) in kinds for each in linears)
    narrow = {each.weight for each in linears if isinstance(each, Int8Linear)}
    are_floats = all(each.dtype == torch.float32 for each in block.parameters() if each not in narrow)
    on_cpu = all(each.device.type == "cpu" for each in (*block.parameters(), *block.buffers()))
    return are_linear and are_floats and on_cpu and block.mlp.act_fn is ACTIVATIONS["silu"]


def _weights(block: Any) -> _LlamaBlock:  # Any: likewise
    own, mlp = block.self_attn, block.mlp
    return {
        "attended_norm": _array(block.input_layernorm.weight),
        "qkv": weight_of(own.qkv_proj),
        "qkv_bias": _bias(own.qkv_proj),
        "head_norms": (_array(own.q_norm.weight), _array(own.k_norm.weight)) if hasattr(own, "q_norm") else None,
        "output": weight_of(own.o_proj),
        "output_bias": _bias(own.o_proj),
        "fed_norm": _array(block.post_attention_layernorm.weight),
        "gate_up": weight_of(mlp.gate_up_proj),
        "gate_up_bias": _bias(mlp.gate_up_proj),
        "down": weight_of(mlp.down_proj),
        "down_bias": _bias(mlp.down_proj),
        "scaling": own.scaling,
        "is_rotated": own.use_rope,
        "window": own.sliding_window,
    }


def weight_of(linear: _Linear) -> _Weight:
    """The form that Rust takes, over the same memory."""
    if isinstance(linear, Int8Linear):
        return "int8", _array(linear.weight), _array(linear.scale)
    if isinstance(linear, HalfLinear):
        halves = _array(linear.weight.view(torch.uint16))
        return ("bfloat16", halves) if linear.weight.dtype == torch.bfloat16 else ("float16", halves)
    if isinstance(linear, Q4Linear):
        return "q4", _array(linear.codes), _array(linear.levels)
    if isinstance(linear, Q8Linear):
        return "q8", _array(linear.codes), _array(linear.steps)
    return _array(linear.weight)


def _bias(linear: _Linear) -> NDArray[np.float32] | None:
    return None if linear.bias is None else _array(linear.bias)


def _array(tensor: torch.Tensor) -> NDArray[Any]:  # Any: of its dtype
    """The same memory, or a copy if it is not aligned, as in some files."""
    return np.require(tensor.detach().numpy(), requirements=["C", "A"])
