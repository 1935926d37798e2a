"""Llama-like models in fewer and larger operations, which saves a decode the time beside reading weights.

Two norms, attention with rotary embeddings and a gated MLP, as transformers has them for the families that say so in
`families.py`. The numbers are the same but for the order of sums. Each product pushes the data of torch and Python out
of the caches, so each call that is saved counts: the forward is plain Python over the modules' tensors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import layer_norm, linear, rms_norm

from llmnode.models.meta_model import ATTENTIONS

if TYPE_CHECKING:
    from llmnode.core.span import Span
    from llmnode.models.families import Family
    from llmnode.models.layers import Mapped, Rotary
    from llmnode.models.meta_model import Attention
    from llmnode.models.native import NativeBlocks


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
        self._attention = attention
        self.dtype = dtype
        self.read_layers()

    def read_layers(self) -> None:
        """Compute with the layers of `blocks` as they are now. Call it if a layer has got another `forward`."""
        self._fused = [FusedBlock(block, self._attention) for block in self.blocks]

    def forward(self, span: Span, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`hidden` (tokens, hidden_size) at `positions` (tokens), through the blocks of `span`, a part of ours."""
        states = hidden[None].to(self.dtype)
        cos, sin = self.rotary(positions[None, None], self.dtype)
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
    """The ends of a Llama-like model: embedding, final norm and head."""

    def __init__(self, model: Any, family: Family) -> None:  # Any: likewise
        decoder = model.get_submodule(family.decoder)
        self.embed: Mapped = getattr(decoder, family.tokens).forward
        self._norm, self._head = _norm(decoder.norm), _product(model.lm_head)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (tokens, hidden_size) to (tokens, vocabulary)."""
        return self._head(self._norm(hidden))


def _product(module: torch.nn.Module) -> Mapped:
    # Others have a forward of their own: a kind in few bits, or what `matmul_choice.py` has set.
    if type(module) is torch.nn.Linear and "forward" not in vars(module):
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
