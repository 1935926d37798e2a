"""From the tensors of a transformers forward to the input of each row's session, or a refusal.

A session holds the real tokens of its row, without padding, and counts its positions itself. Servers compute causal
attention. Anything else is refused here, before anything is computed. It knows neither sessions nor peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig

IGNORED_LABEL = -100
"""The label of transformers for a token that has no part in the loss."""


@dataclass(frozen=True, slots=True)
class Past:
    """The columns of a cache. real: (rows, columns), bool; `positions` and `offsets` as in `SessionCache`, by row."""

    real: torch.Tensor
    positions: Sequence[int]
    offsets: Sequence[int | None]
    prompts: int = 0
    """Positions of trainable prompts, which come before those of the columns."""

    @classmethod
    def empty(cls, rows: int, prompts: int = 0) -> Past:
        return cls(torch.ones(rows, 0, dtype=torch.bool), [0] * rows, [None] * rows, prompts)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """The new columns. real: (rows, new columns), bool. `position_ids` are those of the real ones, (tokens,), by
    row.
    """

    real: torch.Tensor
    position_ids: Sequence[torch.Tensor]
    offsets: Sequence[int | None]
    longest: int
    """Positions that the longest row has with it."""
    is_uniform: bool
    """Whether rows of the same tokens are the same: learned positions may differ."""


class Positions:
    """The meaning of a model's position ids, by its config."""

    def __init__(self, config: PreTrainedConfig, *, learned: int | None) -> None:
        """`learned` says how many positions have an embedding, in models that learn one for each."""
        has_alibi = config.model_type == "bloom" or bool(getattr(config, "alibi", False))
        self.learned = learned
        """The client adds these. Otherwise servers rotate queries and keys, or have ALiBi."""
        self.follow_mask = config.model_type == "opt" or has_alibi
        """Without position ids, and in spite of them with ALiBi, tokens are counted without the padding."""
        self.are_ignored = has_alibi
        layers = getattr(config, "layer_types", None) or ()
        self.has_window = getattr(config, "sliding_window", None) is not None or "sliding_attention" in layers


def read_batch(
    past: Past, columns: int, attention_mask: object, position_ids: torch.Tensor | None, kind: Positions
) -> PaddedBatch:
    """`columns` new columns after `past`, with the mask and the position ids of a forward.

    Raises ConfigError if a session cannot do that.
    """
    rows = len(past.positions)
    if kind.follow_mask and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
        raise ConfigError("models of this family count positions by a mask of (rows, columns): give that")
    seen = _seen(attention_mask, past, columns)
    real = seen[:, past.real.shape[1] :]
    counts = real.sum(dim=1).tolist()
    if kind.has_window and _has_holes(seen):
        raise ConfigError("the mask hides tokens between others, and windows of attention count them: pad on the left")
    given = _position_ids(seen, columns, position_ids, kind)
    ids = [row[kept] for row, kept in zip(given, real, strict=True)]
    offsets: list[int | None] = list(past.offsets)
    for row in range(rows):
        if counts[row]:
            offsets[row] = _offset(ids[row], past, kind, row)
    if kind.learned is not None and attention_mask is None and not past.real.shape[1] and not _go_on(given):
        raise ConfigError("position_ids that begin anew pack several sequences into a row: give each a row of its own")
    longest = max(position + count for position, count in zip(past.positions, counts, strict=True))
    firsts = {int(row[0]) for row in ids if len(row)}
    is_uniform = kind.learned is None or (len(firsts) < 2 and all(_go_on(row[None]) for row in ids))
    return PaddedBatch(real, ids, offsets, longest, is_uniform)


@dataclass(frozen=True, slots=True)
class ScoredColumns:
    """The columns to score in each row. Rows that are not `are_apart` come one after the other, as one."""

    columns: Sequence[Sequence[int]]
    are_apart: bool = True


def kept_columns(rows: int, columns: int, keep: int | torch.Tensor) -> ScoredColumns:
    """By `logits_to_keep`, as transformers has it. Raises ConfigError for columns that there are not."""
    every = torch.arange(columns).expand(rows, columns)
    try:
        if isinstance(keep, int):
            return ScoredColumns(every[:, slice(-keep, None)].tolist())
        keep = keep.cpu()
        if keep.ndim == 1:
            return ScoredColumns(every[:, keep].tolist())
        if keep.dtype == torch.bool:
            return ScoredColumns([row[kept].tolist() for row, kept in zip(every, keep, strict=True)], are_apart=False)
        if keep.ndim != 2:
            raise ValueError(f"it has {keep.ndim} dimensions")
        return ScoredColumns(torch.take_along_dim(every, keep, dim=1).tolist())
    except (IndexError, RuntimeError, ValueError) as error:
        raise ConfigError(f"logits_to_keep does not fit {rows} rows of {columns} new tokens: {error}") from error


def check_ends_real(attention_mask: torch.Tensor | None) -> None:
    """The mask of a prompt is (rows, columns). Raises ConfigError if a row that has tokens ends in padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return
    ends_padded = ~attention_mask[:, -1].bool() & attention_mask.bool().any(dim=1)
    if ends_padded.any():
        row = int(ends_padded.nonzero()[0])
        raise ConfigError(f'row {row} ends in padding: set padding_side="left" in the tokenizer')


def check_labels(labels: torch.Tensor, real: torch.Tensor, shifted: torch.Tensor | None = None) -> None:
    """labels, real: (rows, columns). Raises ConfigError if padding is to predict one: its scores mean nothing.

    `shifted` are the labels that the columns themselves predict, if the caller has them.
    """
    for given in (labels, shifted):
        if given is not None and given.shape != real.shape:
            raise ConfigError(f"labels of shape {tuple(given.shape)}: expected {tuple(real.shape)}")
    predicted = (labels[:, 1:] if shifted is None else shifted[:, :-1]) != IGNORED_LABEL
    if (predicted.cpu() & ~real[:, :-1]).any():
        raise ConfigError(
            f"a label follows padding, from which nothing can be predicted: set it to {IGNORED_LABEL}, as the labels "
            "of padding itself, or pad on the right"
        )


def _seen(attention_mask: object, past: Past, columns: int) -> torch.Tensor:
    """The columns, old and new, that are real: (rows, all columns), bool."""
    rows, before = past.real.shape
    new = torch.ones(rows, columns, dtype=torch.bool)
    if attention_mask is None:
        if not past.real.all():
            raise ConfigError("the cache has padded rows: pass the attention_mask of all columns, old and new")
        return torch.cat((past.real, new), dim=1)
    if not isinstance(attention_mask, torch.Tensor):
        raise ConfigError(f"attention_mask is a {type(attention_mask).__name__}: give a tensor of (rows, columns)")
    mask = attention_mask.cpu()
    if mask.ndim == 4:
        mask = _flat(mask, before, columns)
    if mask.ndim != 2 or len(mask) not in (1, rows) or mask.shape[1] < before + columns:
        raise ConfigError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: expected ({rows}, {before + columns})"
        )
    seen = mask[:, : before + columns].bool().expand(rows, -1)
    if not torch.equal(seen[:, :before], past.real):
        raise ConfigError("the attention_mask differs from that of the tokens in the cache: it cannot change later")
    return seen


def _flat(mask: torch.Tensor, before: int, columns: int) -> torch.Tensor:
    """The mask of columns that is in a causal one of (rows, 1, new, all), bool or added to scores."""
    if mask.shape[2:] != (columns, before + columns):
        raise ConfigError(f"attention_mask of shape {tuple(mask.shape)}: expected {columns} by {before + columns}")
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (allowed | (mask <= -1e4)).all():
        raise ConfigError("an attention_mask that adds to scores cannot be sent: servers compute causal attention")
    seen = allowed.any(dim=2)[:, 0]  # (rows, all columns)
    causal = torch.ones(columns, before + columns, dtype=torch.bool).tril(before)
    expected = causal & seen[:, None, None, :]
    asked = seen[:, None, before:, None]  # the rows of padding itself do not matter
    if ((allowed != expected) & asked).any():
        raise ConfigError("the attention_mask is not causal attention with padding, which is what servers compute")
    return seen


def _has_holes(seen: torch.Tensor) -> bool:
    """Whether padding follows something real, and is followed by something real."""
    begun = seen[:, :-1].cumsum(dim=1) > 0
    return bool((begun & ~seen[:, :-1] & seen[:, 1:]).any())


def _position_ids(seen: torch.Tensor, columns: int, position_ids: torch.Tensor | None, kind: Positions) -> torch.Tensor:
    """Position ids of all new columns, (rows, columns), as given or as transformers makes them. Those of padding mean
    nothing.
    """
    rows, total = seen.shape
    if kind.are_ignored or (position_ids is None and kind.follow_mask):
        return (seen.cumsum(dim=1) - 1)[:, total - columns :]
    if position_ids is None:
        return torch.arange(total - columns, total).expand(rows, columns)
    if position_ids.ndim != 2 or len(position_ids) not in (1, rows) or position_ids.shape[1] != columns:
        raise ConfigError(f"position_ids of shape {tuple(position_ids.shape)}: expected ({rows}, {columns})")
    return position_ids.cpu().expand(rows, columns)


def _offset(ids: torch.Tensor, past: Past, kind: Positions, row: int) -> int:
    """The constant by which `ids` exceed the positions of the row's session."""
    first, position, before = int(ids[0]), past.positions[row], past.offsets[row]
    if kind.learned is not None:
        most = kind.learned - past.prompts
        if not 0 <= int(ids.min()) <= int(ids.max()) < most:
            after = f" after {past.prompts} prompts" if past.prompts else ""
            raise ConfigError(
                f"the position_ids of row {row} go from {int(ids.min())} to {int(ids.max())}, and the model has "
                f"embeddings for 0 to {most - 1}{after}"
            )
        return 0
    offset = first - position
    if int(ids[-1]) - first != len(ids) - 1 or (len(ids) > 2 and not _go_on(ids[None])):
        raise ConfigError(
            f"the position_ids of row {row} leave gaps or begin anew: a session counts its own, one by one"
        )
    if before is not None and before != offset:
        raise ConfigError(
            f"the position_ids of row {row} go on from {first}, and the cache ends at {before + position - 1}: "
            "leave no gap; if rows are padded, pad on the left"
        )
    return offset


def _go_on(ids: Any) -> bool:  # Any: mypy takes the comparison for one of numbers
    """Whether each is one more than the one before."""
    return bool((ids[:, 1:] - ids[:, :-1] == 1).all())
