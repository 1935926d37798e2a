"""The layers of blocks of the Llama kind: made from a blueprint without storage, and joined into fewer products."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import gelu, relu, silu

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.models.blueprint import BlockPlan

    Mapped = Callable[[torch.Tensor], torch.Tensor]


LAYERS = {"input_layernorm", "post_attention_layernorm"}
LAYERS |= {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
LAYERS |= {f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
"""Only these may have parameters in a block. With any other it computes something else."""
ACTIVATIONS: dict[str, Mapped] = {
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}
"""By the names that configs have for them."""


class Norm(torch.nn.Module):
    """The weight of an RMS norm, without storage."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)
        self.variance_epsilon = epsilon


def make_block(
    plan: BlockPlan, index: int, activation: str, dtypes: Mapping[str, torch.dtype]
) -> Any:  # Any: as transformers types one
    """The layers of the block `index`, without storage, under the names that transformers gives them.

    `dtypes` are those of its parameters, by the same names.
    """
    block: Any = torch.nn.Module()
    block.self_attn, block.mlp = torch.nn.Module(), torch.nn.Module()
    for name, shape in plan.shapes.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight":
            parent, _, own_name = layer.rpartition(".")
            bias = dtypes.get(f"{layer}.bias")
            made = Norm(*shape, plan.epsilon, dtypes[name]) if len(shape) == 1 else _linear(shape, dtypes[name], bias)
            setattr(block.get_submodule(parent), own_name, made)
    attention = block.self_attn
    attention.layer_idx, attention.head_dim, attention.scaling = index, plan.head_dim, plan.scaling
    attention.sliding_window, attention.use_rope = plan.window, plan.is_rotated
    block.mlp.act_fn = ACTIVATIONS[activation]
    return block


def join_products(block: Any) -> None:  # Any: likewise
    """Queries, keys and values of one product, and the two halves of the MLP of another."""
    attention, mlp = block.self_attn, block.mlp
    attention.heads = [each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj)]
    mlp.inner = mlp.down_proj.in_features
    _join(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    _join(mlp, "gate_up_proj", ("gate_proj", "up_proj"))


def _join(parent: Any, name: str, names: Sequence[str]) -> None:  # Any: likewise
    """Put one linear layer in the place of several. `parent.joined` has the names and outputs of those."""
    linears = [getattr(parent, each) for each in names]
    parent.joined = {name: {each: linear.out_features for each, linear in zip(names, linears, strict=True)}}
    setattr(parent, name, _joined(*linears))
    for each in names:
        delattr(parent, each)


class Rotary(torch.nn.Module):
    """Cosines and sines of rotary embeddings at given positions."""

    def __init__(self, frequencies: Sequence[float], scaling: float) -> None:
        super().__init__()
        self.frequencies = torch.nn.Buffer(torch.tensor(frequencies, dtype=torch.float32), persistent=False)
        self.scaling = scaling

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (..., tokens); both are (..., tokens, head_dim)."""
        halves = positions[..., None].float() * self.frequencies
        turns = torch.cat((halves, halves), dim=-1)
        return (turns.cos() * self.scaling).to(dtype), (turns.sin() * self.scaling).to(dtype)


def _linear(shape: Sequence[int], weight: torch.dtype, bias: torch.dtype | None) -> torch.nn.Linear:
    outputs, inputs = shape
    made = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight).requires_grad_(False)
    if bias is not None:
        made.bias = torch.nn.Parameter(torch.empty(outputs, device="meta", dtype=bias), requires_grad=False)
    return made


def _joined(*linears: torch.nn.Linear) -> torch.nn.Linear:
    """One linear layer, whose outputs are those of `linears`, end to end."""
    outputs = sum(each.out_features for each in linears)
    joined = torch.nn.Linear(linears[0].in_features, outputs, bias=False, device="meta")
    joined.weight = _end_to_end([each.weight for each in linears])
    if linears[0].bias is not None:
        joined.bias = _end_to_end([each.bias for each in linears])
    return joined


def _end_to_end(parameters: Sequence[torch.Tensor]) -> torch.nn.Parameter:
    first = parameters[0]
    if first.is_meta:  # torch would import its compiler to concatenate nothing, in seconds
        outputs = sum(len(each) for each in parameters)
        dtype = reduce(torch.promote_types, (each.dtype for each in parameters))
        joined = torch.empty(outputs, *first.shape[1:], dtype=dtype, device="meta")
    else:
        joined = torch.cat([each.detach() for each in parameters])
    return torch.nn.Parameter(joined, requires_grad=False)
