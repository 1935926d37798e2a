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


class NarrowEmbedding(torch.nn.Module):
    """Like `torch.nn.Embedding`, over the rows of a linear layer's weight."""

    def __init__(self, layer: Narrow) -> None:
        super().__init__()
        self.layer = layer

    @property
    def num_embeddings(self) -> int:
        return self.layer.outputs

    @property
    def weight(self) -> torch.Tensor:
        """A copy, in fp32."""
        return self.layer.rows(torch.arange(self.layer.outputs))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Raises IndexError for a token that there is not."""
        if tokens.numel() and tokens.min() < 0:
            raise IndexError("index out of range in self")  # as torch has it, where rows are not counted from the end
        return self.layer.rows(tokens)


class NarrowHead(torch.nn.Module):
    """The same as the linear layer, on torch's number of threads: few rows are multiplied in Rust."""

    def __init__(self, layer: Narrow) -> None:
        super().__init__()
        self.layer = layer
        self._few: Product | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_few": None}

    @property
    def weight(self) -> torch.Tensor:
        """A copy, in fp32."""
        return self.layer.rows(torch.arange(self.layer.outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
