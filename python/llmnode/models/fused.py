"""Models of the Llama kind in fewer and larger operations: what a decode of one token pays for besides reading weights.

Two norms, attention with rotary embeddings and a gated MLP, as transformers has them for the families that say so in
`families.py`. The numbers are the same but for the order of sums. Between two products all that torch and Python need
is out of the caches again, so each call that is not made counts: the forward is plain Python over what modules hold.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import layer_norm, linear, rms_norm

from llmnode.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.families import Family

    Mapped = Callable[[torch.Tensor], torch.Tensor]


_LAYERS = {"input_layernorm", "post_attention_layernorm"}
_LAYERS |= {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
_LAYERS |= {f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
"""What may have parameters in a block. With any other it computes something else."""


def join_products(block: Any) -> None:  # Any: each family's block is a class of its own
    """Queries, keys and values of one product, and the two halves of the MLP of another, in a block of transformers.

    Its own forward is not for use any more. Raises ModelError for a block that is not as we know it.
    """
    unknown = {name.rpartition(".")[0] for name, _ in block.named_parameters()} - _LAYERS
    if unknown:
        raise ModelError(
            f"a {type(block).__name__} has {', '.join(sorted(unknown))} in this version of transformers, "
            "which we do not know: use another version of transformers"
        )
    attention, mlp = block.self_attn, block.mlp
    attention.heads = [each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj)]
    attention.qkv_proj = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    mlp.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
    del attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


class FusedBlock:
    """The forward of a block whose products are joined, and quantized or not."""

    def __init__(self, block: Any, attention: str) -> None:  # Any: likewise
        """`attention` names a function that transformers knows, which makes its own masks."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        own, mlp = block.self_attn, block.mlp
        attend: Callable[..., tuple[torch.Tensor, object]] = ALL_ATTENTION_FUNCTIONS[attention]
        self._attend = partial(attend, own, attention_mask=None, scaling=own.scaling, sliding_window=_window(own))
        self._head_dim: int = own.head_dim
        self._heads: tuple[int, int] = own.heads
        self._is_rotated = bool(getattr(own, "use_rope", True))
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


def _joined(*linears: torch.nn.Linear) -> torch.nn.Linear:
    """One linear layer, whose outputs are those of `linears`, end to end."""
    outputs = sum(each.out_features for each in linears)
    joined = torch.nn.Linear(linears[0].in_features, outputs, bias=False, device="meta")
    joined.weight = torch.nn.Parameter(torch.cat([each.weight.detach() for each in linears]), requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = torch.nn.Parameter(torch.cat([each.bias.detach() for each in linears]), requires_grad=False)
    return joined


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


def _window(attention: Any) -> int | None:  # Any: likewise
    """Mistral's attention reads it from its config at each call."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window
