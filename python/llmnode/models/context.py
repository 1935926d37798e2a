"""The longest sequence that a model was made for, by its config: there is one rule for each kind of positions.

Users are told this number, and longer prompts are refused. If a config has several claims, the larger one is taken: a
length that is too large makes answers worse, as with transformers, and one that is too small forbids good use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError
from llmnode.models.ropes import CHANGING_ROPES, SCALED_ROPES, ropes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedConfig

    from llmnode.models.families import Family

_NAMES = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "model_max_length",
)
"""By which configs tell it, or tell a longer one: Command-R in `model_max_length`, BLOOM in `seq_length`."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""transformers' cache reads these in any config, but attention only in those families that declare them."""
_MOST_TOKENS = 2**32 - 1
"""The largest number that fits in an announcement."""


@dataclass(frozen=True, slots=True)
class Context:
    """`reason` says what happens beyond `tokens`, for messages, if the model goes on there and we do not."""

    tokens: int
    reason: str = ""


def context_of(config: PreTrainedConfig, family: Family | None) -> Context:
    """Raises ModelError if the config does not tell."""
    ropes = list(ropes_of(config))
    return min((*_limits(config, ropes), Context(_told(config, family, ropes))), key=lambda each: each.tokens)


def _told(
    config: Any, family: Family | None, ropes: Sequence[Mapping[str, Any]]
) -> int:  # Any: each family's has its own
    if family is not None and family.positions is not None:  # a table with a row per position
        return _first(config)
    told = [_whole(getattr(config, name, None)) for name in _NAMES]
    if len(ropes) == 1 and ropes[0].get("rope_type") in SCALED_ROPES:
        told.append(_stretched(config, ropes[0]))
    if family is not None and family.context_tokens is not None:
        told.append(family.context_tokens)
    return min(max(told), _MOST_TOKENS) or _first(config)


def _limits(config: Any, ropes: Sequence[Mapping[str, Any]]) -> Iterator[Context]:  # Any: likewise
    """The lengths up to which we compute the same as transformers."""
    for rope in ropes:
        if (kind := rope.get("rope_type")) in CHANGING_ROPES:
            first = _whole(rope.get("original_max_position_embeddings")) if kind == "longrope" else 0
            why = f"beyond it its rotary embeddings, of the type {kind!r}, change with the length"
            yield Context(first or _first(config), why)
    for option in _WINDOWS:
        if not hasattr(type(config), option) and (window := _whole(getattr(config, option, None))):
            why = f"beyond it transformers' cache forgets what its attention has no window for: {option}"
            yield Context(window, why)


def _stretched(config: Any, rope: Mapping[str, Any]) -> int:  # Any: likewise
    before = _whole(rope.get("original_max_position_embeddings")) or _first(config)
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        return before
    return min(int(before * factor), _MOST_TOKENS)


def _first(config: Any) -> int:  # Any: likewise
    if (tokens := _whole(getattr(config, "max_position_embeddings", None))) < 1:
        raise ModelError(f"the config of the family {config.model_type!r} has no max_position_embeddings: get it again")
    return min(tokens, _MOST_TOKENS)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
