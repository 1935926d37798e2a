"""The kinds of rotary embeddings that we know, and those that a config describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INCLUDED_ROPES = ("default", "llama3", "proportional")
"""For these, `max_position_embeddings` is already the whole length: Llama 3.1 has 131072 there, with a factor of 8."""
SCALED_ROPES = ("linear", "yarn")
"""Stretched by a factor, and configs keep the length from before in `max_position_embeddings` (Vicuna 16k; Qwen2.5, as
its authors have it switched on) or in `original_max_position_embeddings` (DeepSeek, Qwen3): that times the factor."""
CHANGING_ROPES = ("dynamic", "longrope")
"""They change with the length of a sequence once it exceeds the first length: transformers then turns new keys
otherwise than those before them, by how the sequence came about, which no server can know. Up to it they are fixed."""
KNOWN_ROPES = (*INCLUDED_ROPES, *SCALED_ROPES, *CHANGING_ROPES)


def ropes_of(config: Any) -> Iterator[Mapping[str, Any]]:  # Any: each family's config has attributes of its own
    """The config's parameters of rotary embeddings: one for all blocks, or one for each type of them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "alibi", False):  # then they are not used
        return
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    yield from nested or [parameters]
