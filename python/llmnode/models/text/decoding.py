"""How far back a tokenizer's decoding of later tokens can change the text of earlier ones.

Decoding is a chain of steps, most of which look at one token at a time. Their results stay. This file knows which steps
look further, and how far. It does not decode.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CLEANUP_REACH = 8
"""transformers' `clean_up_tokenization` removes spaces before marks and contractions. The longest of them, " n ' t", is
shorter than this: a space with this many characters after it stays."""

_PER_TOKEN = {"BPEDecoder", "CTC", "Metaspace", "Replace", "Strip", "WordPiece"}
"""These change a token by itself and the token before or after it, and later tokens only add to that."""


@dataclass(frozen=True, slots=True)
class UnsettledEnd:
    """The end of a text that more tokens may still change."""

    characters: int = 0
    """The number of last characters that may change."""
    byte_runs: bool = False
    """All that tokens of single bytes (`<0xE2>`) say, until a token of another kind comes: one byte that is no UTF-8
    makes every character of its run unreadable."""
    everything: bool = False
    """It is not known: the text is settled when the last token has come."""


EVERYTHING = UnsettledEnd(everything=True)


def reach_of(tokenizer: Any) -> UnsettledEnd:  # Any: transformers types its tokenizers so
    """Read it from the tokenizer's description of its decoder, and from what its class does after that."""
    from transformers import PreTrainedTokenizerBase
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    made = type(tokenizer)
    cleanup: Callable[..., str] = PreTrainedTokenizerBase.clean_up_tokenization
    decodes_alike = getattr(made, "_decode", None) is TokenizersBackend._decode
    if not decodes_alike or getattr(made, "clean_up_tokenization", None) is not cleanup:
        return EVERYTHING
    reach = _reach_of_steps(_steps(tokenizer.backend_tokenizer.decoder))
    if reach.everything or not tokenizer.clean_up_tokenization_spaces:
        return reach
    return UnsettledEnd(reach.characters + _CLEANUP_REACH, reach.byte_runs)


def _steps(decoder: Any) -> Sequence[Mapping[str, Any]]:  # Any: of tokenizers, which has no type for one
    """The decoder's steps as JSON has them, flat; none without a decoder, which joins tokens with spaces."""
    if decoder is None:
        return ()
    return list(_flat(json.loads(decoder.__getstate__())))


def _flat(step: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [each for inner in step["decoders"] for each in _flat(inner)]


def _reach_of_steps(steps: Sequence[Mapping[str, Any]]) -> UnsettledEnd:
    characters, byte_runs = 0, False
    is_whole = False  # from here on it is one string: a step that looks at "a token" looks at all of it
    for step in steps:
        kind = step["type"]
        if kind in ("Fuse", "ByteLevel"):
            is_whole = True
        elif kind == "ByteFallback" and not is_whole:
            byte_runs = True
        elif kind == "WordPiece" and is_whole:
            characters += _CLEANUP_REACH if step["cleanup"] else 0
        elif kind not in _PER_TOKEN or (is_whole and not _is_by_character(step)):
            return EVERYTHING
    return UnsettledEnd(characters, byte_runs)


def _is_by_character(step: Mapping[str, Any]) -> bool:
    """Whether a step of `_PER_TOKEN` is as harmless to a whole text as to a token."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] == "Metaspace" or (step["type"] == "Strip" and not step["stop"])  # at the end it is unsound
