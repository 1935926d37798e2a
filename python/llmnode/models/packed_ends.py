"""Embedding and head with weights in as few bits as they need (`packed_linear.py`), since each token reads the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from llmnode._native import LlamaBlocks, Product
from llmnode.models.native import LANES, weight_of
from llmnode.models.weights.packed_linear import HALVES, HalfLinear, found_narrow

if TYPE_CHECKING:
    from llmnode.models.weights.packed_linear import Narrow

MOST_ROWS = 64
"""For more of them the weights are widened, for BLAS."""
_ROWS = 1024
"""Are compared at a time."""


class _StandIn(torch.nn.Parameter):
    """The parameter of a weight in few bits: its shape and name, and no numbers until somebody wants to train it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if _is_wide(self):
            copied: torch.nn.Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]  # torch's
            return copied
        made = memo[id(self)] = _StandIn(torch.zeros((), dtype=torch.float32).expand(self.shape), requires_grad=False)
        return made  # torch would fill the copy with numbers


def _is_wide(weight: torch.Tensor) -> bool:
    return weight.untyped_storage().nbytes() >= weight.nbytes


class _NarrowWeight(torch.nn.Module):
    """The weight of an embedding or a head, of a linear layer in few bits. It is fp32 once somebody wants to train it.

    It is a parameter all the time, by the name of transformers. A tied one is a single parameter of both modules.
    """

    def _hold(self, layer: Narrow) -> None:
        self.layer = layer
        nothing = torch.zeros((), dtype=torch.float32).expand(layer.outputs, layer.inputs)
        self._parameters["weight"] = layer.__dict__.setdefault("stand_in", _StandIn(nothing, requires_grad=False))

    @property
    def is_narrow(self) -> bool:
        """Whether the numbers are those of `layer`."""
        weight: Any = self._parameters["weight"]  # Any: torch types it widely
        if weight.requires_grad:
            self.widen()
        return not _is_wide(weight)

    @property
    def weight(self) -> torch.Tensor:
        """(rows, size), in fp32; a copy while it is narrow."""
        weight: Any = self._parameters["weight"]  # Any: likewise
        return self.layer.rows(torch.arange(self.layer.outputs)) if self.is_narrow else weight

    def widen(self) -> None:
        """Have numbers of fp32 from now on, and so have the modules that the weight is tied to."""
        weight: Any = self._parameters["weight"]  # Any: likewise
        if not _is_wide(weight):
            weight.data = self.layer.rows(torch.arange(self.layer.outputs))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_narrow:
            del destination[f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *given: Any) -> None:
        if (name := f"{prefix}weight") in state_dict:
            self.widen()
        super()._load_from_state_dict(state_dict, prefix, *given)
        if self.is_narrow and name in given[2]:
            given[2].remove(name)  # which is the list of missing ones


class NarrowEmbedding(_NarrowWeight, torch.nn.Embedding):  # type: ignore[override]  # the weight is a property
    """An embedding over the rows of a linear layer's weight."""

    def __init__(self, layer: Narrow) -> None:
        torch.nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = layer.outputs, layer.inputs
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self._hold(layer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Raises IndexError for a token that there is not."""
        if not self.is_narrow:
            return torch.nn.Embedding.forward(self, tokens)
        return self.layer.rows(tokens)


class NarrowHead(_NarrowWeight, torch.nn.Linear):  # type: ignore[override]  # likewise
    """The same as the linear layer, on torch's number of threads: few rows are multiplied in Rust."""

    def __init__(self, layer: Narrow) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.inputs, layer.outputs
        self._few: Product | None = None
        self._hold(layer)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_few": None}

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]  # likewise
        return self.layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_narrow:
            return torch.nn.Linear.forward(self, x)
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        if has_gradient or x.numel() > MOST_ROWS * self.layer.inputs:
            scores: torch.Tensor = self.layer(x)
            return scores
        if self._few is None:
            sizes = (self.layer.outputs, self.layer.inputs)
            self._few = Product(weight_of(self.layer), *sizes, torch.get_num_threads())
        product = x.new_empty(*x.shape[:-1], self.layer.outputs)
        self._few.into(x.detach().contiguous().numpy(), product.numpy())
        return product if self.layer.bias is None else product.add_(self.layer.bias)


def keep_ends_narrow(model: Any, decoder: Any, tokens: str) -> None:  # Any: as transformers types a causal LM
    """Replace the embedding, `tokens` in `decoder`, and the head of a model in fp32, if they need fewer bits.

    A tied weight stays one. Each replaced part is in memory beside its replacement, one part at a time.
    """
    if not LlamaBlocks.is_fast() or getattr(getattr(decoder, tokens), "max_norm", None) is not None:
        return
    is_tied = model.lm_head.weight is getattr(decoder, tokens).weight
    if (found := _found(model.lm_head)) is not None:
        model.lm_head = NarrowHead(found)
    if not is_tied:
        outputs, inputs = getattr(decoder, tokens).weight.shape
        layer = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
        layer.weight = getattr(decoder, tokens).weight
        found = _found(layer)
    if found is not None:
        setattr(decoder, tokens, NarrowEmbedding(found))


def _found(layer: torch.nn.Linear) -> Narrow | None:
    """The same layer in fewer bits."""
    if layer.weight.dtype != torch.float32 or layer.weight.shape[1] % LANES:
        return None
    if (found := found_narrow(layer)) is not None:
        return found
    halves = (_as_half(layer.weight.detach(), half) for half in HALVES.values())
    return next((HalfLinear(half, layer.bias) for half in halves if half is not None), None)


def _as_half(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """In 16 bits, if that is the same. No more of it than a part is there a third time."""
    half = torch.empty(0, dtype=dtype)
    for first in range(0, len(weight), _ROWS):
        some = weight[first : first + _ROWS]
        if not torch.equal(some.to(dtype).float(), some):
            return None
        if not first:
            half = torch.empty_like(weight, dtype=dtype)
        half[first : first + _ROWS] = some
    return half
