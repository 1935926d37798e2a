"""Explains why transformers cannot load the files of a tokenizer, with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import ModelError
from llmnode.models.sources.damage import one_line, what_is_instead, what_is_wrong_in_json

if TYPE_CHECKING:
    from pathlib import Path

_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.*", "merges.txt")
_MESSAGE_CHARS = 200
"""The most characters of a library's message: the rest is on where to read more."""
_NONE = "it has no tokenizer.json: put the one of the model's publisher there"
_FAST = "where it is installed, `AutoTokenizer.from_pretrained(...).save_pretrained(...)` makes a tokenizer.json"


def what_is_wrong(folder: Path, error: Exception) -> str:
    """The fault in one line. `error` is transformers', whose words are seldom about the file that is to blame."""
    for name in _JSON:
        if (folder / name).is_file() and (wrong := what_is_wrong_in_json(folder / name)):
            return f"{name} {wrong}"
    others = _other_vocabularies(folder)
    for file in others:
        if wrong := what_is_instead(file):
            return f"{file.name} {wrong}"
    if "trust_remote_code" in str(error):
        return "it is code of the model's own, which is never run here; use a model that has a tokenizer.json"
    if not (folder / "tokenizer.json").is_file():
        if others:
            return f"{others[0].name} alone needs a library that is not here ({_short(error)}); {_FAST}"
        return _NONE
    return f"transformers does not take its files ({type(error).__name__}: {_short(error)}); download them again"


def check_found(folder: Path) -> None:
    """Raises ModelError without any vocabulary: some classes of transformers then load, and know nothing."""
    if not (folder / "tokenizer.json").is_file() and not _other_vocabularies(folder):
        raise ModelError(f"{folder} has no usable tokenizer: {_NONE}")


def _other_vocabularies(folder: Path) -> list[Path]:
    return sorted({file for pattern in _VOCABULARIES for file in folder.glob(pattern)})


def _short(error: Exception) -> str:
    message = one_line(error)
    return message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}..."
