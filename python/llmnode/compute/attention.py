"""Attention for several sequences in one forward, as a function that transformers calls in every block.

The tokens of all sequences are laid end to end in one row, without padding. Each attends to its own KV. Any family
that goes through transformers' `AttentionInterface` works unchanged.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from llmnode.compute.pages import row_of_forward
from llmnode.errors import ModelError
from llmnode.models.meta_model import ATTENTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.compute.kv import KV

ATTENTION = "llmnode"
"""The name that transformers knows `ragged_attention` by."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of the row that belongs to one sequence: `length` tokens at its positions `start` and on."""

    kv: KV
    start: int
    length: int
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window: blocks of one kind share it
    _biased: list[torch.Tensor] = field(default_factory=list)  # shared by all blocks, once there is one

    def seen_from(self, window: int | None) -> int:
        """The first position that any token of the segment looks at; with a window each sees that many, itself too."""
        return 0 if window is None else max(0, self.start - window + 1)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """(length, positions seen) True where a token may attend; None where all may attend to all.

        A single token needs none: the positions before its window are cut off already.
        """
        if self.length == 1:
            return None
        mask = self._masks.get(window)
        if mask is None:
            first = self.seen_from(window)
            own = self.start - first  # column of the first token's own position
            mask = torch.ones(self.length, own + self.length, dtype=torch.bool, device=device).tril(diagonal=own)
            if window is not None and own + self.length > window:
                mask = mask.triu(diagonal=own - window + 1)
            self._masks[window] = mask
        return mask

    def biased_mask(self, key_bias: torch.Tensor) -> torch.Tensor:
        """(heads, length or 1, positions) to be added to scores; `key_bias` is the same in all blocks."""
        if not self._biased:
            biased = key_bias[:, None, : self.start + self.length]
            mask = self.mask(None, key_bias.device)
            self._biased.append(biased if mask is None else biased.masked_fill(~mask, float("-inf")))
        return self._biased[0]


segments_of_forward: ContextVar[Sequence[Segment]] = ContextVar("segments_of_forward")
"""The segments of the running forward. They are set around each forward, in the thread that runs it.

There are none while a step is recorded, since it will be replayed for others.
"""


def segments_now() -> Sequence[Segment]:
    """Raises ModelError while a step is recorded."""
    if segments := segments_of_forward.get():
        return segments
    raise ModelError("this model's attention takes each sequence by itself, so that no step can be recorded")


def ragged_attention(  # noqa: PLR0913  # the parameters are those of transformers' attention functions
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    **_unused: Any,  # Any: arguments that only some families need
) -> tuple[torch.Tensor, None]:
    """Causal attention of each segment over its own KV. query: (1, heads, tokens, head_dim), and so are key and value.

    `key_bias`, (heads, positions), is added to scores by the position of the key: ALiBi, which has no window.
    """
    if s_aux is not None:
        raise ModelError("this model has attention sinks, which are not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]  # set by transformers on every attention module
    row = row_of_forward.get()
    if row is not None and key_bias is None and softcap is None and row.is_whole:
        return row.attend(layer, query, key, value, scaling, sliding_window), None
    segments = segments_now()
    lengths = [segment.length for segment in segments]
    alone = len(segments) == 1
    of_segments = ((each,) if alone else each.split(lengths, dim=2) for each in (query, key, value))
    outputs: list[torch.Tensor] = []
    for segment, new_query, new_keys, new_values in zip(segments, *of_segments, strict=True):
        seen_from = segment.seen_from(sliding_window)
        keys, values = segment.kv.extend(layer, segment.start, new_keys, new_values, seen_from)
        if key_bias is not None:
            mask, gqa = segment.biased_mask(key_bias)[None], query.shape[1] != keys.shape[1]
            outputs.append(
                scaled_dot_product_attention(new_query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=gqa)
            )
        elif softcap is None:
            outputs.append(_attend(new_query, keys, values, segment, sliding_window, scaling))
        else:
            mask = segment.mask(sliding_window, query.device)
            outputs.append(_attend_softcapped(new_query, keys, values, mask, scaling, softcap))
    output = outputs[0] if alone else torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


ATTENTIONS[ATTENTION] = ragged_attention  # which makes no mask: the segments have their own


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    heads, tokens, head_dim = query.shape[1:]
    shared = heads // keys.shape[1]  # heads of queries that share keys and values
    if tokens == 1 and shared > 1:  # as queries of one head, for which all that is shared is read once
        grouped = query.reshape(1, -1, shared, head_dim)
        return scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(query.shape)
    causal = segment.start == 0 and tokens > 1 and (window is None or tokens <= window)
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=None if causal else segment.mask(window, query.device),
        is_causal=causal,  # the kernels have that mask built in
        scale=scaling,
        enable_gqa=shared > 1,
    )


def _attend_softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Scores squeezed into (-softcap, softcap) before the softmax, which the fused kernels cannot do."""
    _, heads, tokens, head_dim = query.shape
    grouped = query.reshape(1, keys.shape[1], -1, tokens, head_dim)  # (1, KV heads, heads of each, tokens, head_dim)
    scores = grouped @ keys[:, :, None].transpose(3, 4) * (head_dim**-0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ values[:, :, None]).reshape(1, heads, tokens, -1)
