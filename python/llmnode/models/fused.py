"""Models of the Llama kind in fewer and larger operations: what a decode of one token pays for besides reading weights.

Two norms, attention with rotary embeddings and a gated MLP, as transformers has them for the families that say so in
`families.py`. The numbers are the same but for the order of sums. Between two products all that torch and Python need
is out of the caches again, so each call that is not made counts: the forward is plain Python over what modules hold.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, rms_norm, silu

from llmnode.models.meta_model import ATTENTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.span import Span
    from llmnode.models.blueprint import BlockPlan
    from llmnode.models.families import Family
    from llmnode.models.meta_model import Attention
    from llmnode.models.native import NativeBlocks

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

    `dtypes` are of its parameters, likewise.
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
    attention.qkv_proj = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    mlp.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
    del attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


class Rotary(torch.nn.Module):
    """Cosines and sines of rotary embeddings at given positions."""

    def __init__(self, frequencies: Sequence[float], scaling: float) -> None:
        super().__init__()
        self.frequencies = torch.nn.Buffer(torch.tensor(frequencies), persistent=False)
        self.scaling = scaling

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: (..., tokens); both are (..., tokens, head_dim)."""
        halves = positions[..., None].float() * self.frequencies
        turns = torch.cat((halves, halves), dim=-1)
        return (turns.cos() * self.scaling).to(dtype), (turns.sin() * self.scaling).to(dtype)


class FusedSpan(torch.nn.Module):
    """The blocks of `span`. Hidden states are fp32 outside, of the weights' dtype inside."""

    def __init__(
        self,
        blocks: torch.nn.ModuleList,
        rotary: Rotary,
        span: Span,
        dtype: torch.dtype,
        attention: str,
        native: NativeBlocks | None = None,
    ) -> None:
        """`blocks` have their weights, and their products joined. `attention` is as in `load_span`.

        `native` is the same, for few positions.
        """
        super().__init__()
        self.span, self.blocks, self.rotary, self.native = span, blocks, rotary, native
        self._fused = [FusedBlock(block, attention) for block in blocks]
        self._dtype = dtype

    def forward(self, span: Span, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`hidden` (tokens, hidden_size) at `positions` (tokens), through the blocks of `span`, a part of ours."""
        states = hidden[None].to(self._dtype)
        cos, sin = self.rotary(positions[None, None], self._dtype)
        for block in self._fused[span.start - self.span.start : span.end - self.span.start]:
            states = block(states, cos, sin)
        return states[0].float()


class FusedBlock:
    """The forward of a block whose products are joined, whatever their weights are kept as."""

    def __init__(self, block: Any, attention: str) -> None:  # Any: likewise
        """`attention` names a function of ours, or one that transformers knows, which makes its own masks."""
        own, mlp = block.self_attn, block.mlp
        window: int | None = own.sliding_window
        attend = ATTENTIONS.get(attention) or _of_transformers(attention)
        self._attend = partial(attend, own, attention_mask=None, scaling=own.scaling, sliding_window=window)
        self._head_dim: int = own.head_dim
        self._heads: tuple[int, int] = own.heads
        self._is_rotated: bool = own.use_rope
        self._norm_heads = (_norm(own.q_norm), _norm(own.k_norm)) if hasattr(own, "q_norm") else None
        self._norm_attended, self._norm_fed = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        self._qkv, self._output = _product(own.qkv_proj), _product(own.o_proj)
        self._gate_up, self._down = _product(mlp.gate_up_proj), _product(mlp.down_proj)
        self._activation: Mapped = mlp.act_fn

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """hidden: (1, tokens, hidden_size); cos, sin: (1, 1, tokens, head_dim)."""
        qkv = self._qkv(self._norm_attended(hidden)).unflatten(2, (-1, self._head_dim)).transpose(1, 2)
        queries, keys = self._heads
        turning, value = qkv[:, : queries + keys], qkv[:, queries + keys :]
        if self._norm_heads is not None:
            norm_query, norm_key = self._norm_heads
            turning = torch.cat((norm_query(turning[:, :queries]), norm_key(turning[:, queries:])), dim=1)
        if self._is_rotated:
            turning = _rotated(turning, cos, sin)
        attended, _ = self._attend(turning[:, :queries], turning[:, queries:], value)
        hidden = hidden + self._output(attended.flatten(2))
        gate, up = self._gate_up(self._norm_fed(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate) * up)


class FusedEnds:
    """Embedding, and final norm and head, of a model of such a family."""

    def __init__(self, model: Any, family: Family) -> None:  # Any: likewise
        decoder = model.get_submodule(family.decoder)
        self.embed: Mapped = getattr(decoder, family.tokens).forward
        self._norm, self._head = _norm(decoder.norm), _product(model.lm_head)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (tokens, hidden_size) to (tokens, vocabulary)."""
        return self._head(self._norm(hidden))


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


def _product(module: torch.nn.Module) -> Mapped:
    if isinstance(module, torch.nn.Linear) and "forward" not in vars(module):  # else it is by `products.py`
        return partial(linear, weight=module.weight, bias=module.bias)
    return module.forward


def _norm(module: Any) -> Mapped:  # Any: each family's is a class of its own
    """The RMS norm. On a CPU torch has no kernel for it, and seven small ones: it is the layer norm of x and -x."""
    weight, epsilon = module.weight, module.variance_epsilon
    if weight.is_cuda:
        return partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=epsilon)
    size, twice = len(weight), torch.cat((weight, weight))
    return lambda x: layer_norm(torch.cat((x, -x), dim=-1), twice.shape, twice, eps=epsilon)[..., :size]


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings (Su et al. 2021), halves of a head as pairs."""
    first, second = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((-second, first), dim=-1), sin)


def _of_transformers(attention: str) -> Attention:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Attention = ALL_ATTENTION_FUNCTIONS[attention]
    return function
