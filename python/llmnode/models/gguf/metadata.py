"""The metadata of a GGUF file, typed. It records which keys were read, so that nothing is left out unnoticed.

Keys are those of the GGUF specification (`gguf.Keys`). The code that reads a key knows its meaning.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_LARGEST = 1 << 31
"""The largest whole number: transformers and torch count no further in every place."""

_HARMLESS = (
    "rope.scaling.finetuned",
    "tensor_data_layout",  # of the file that was converted
    "tokenizer.ggml.token_type_count",  # BERT's
    "tokenizer.ggml.precompiled_charsmap",  # of Unigram tokenizers; the others do not normalize
    "tokenizer.ggml.remove_extra_whitespaces",  # likewise
    "tokenizer.huggingface.json",  # it repeats tokenizer.ggml.*
    "tokenizer.ggml.prefix_token_id",  # for filling in the middle, which prompts ask for by the tokens themselves
    "tokenizer.ggml.suffix_token_id",
    "tokenizer.ggml.middle_token_id",
    "tokenizer.ggml.fim_pre_token_id",
    "tokenizer.ggml.fim_suf_token_id",
    "tokenizer.ggml.fim_mid_token_id",
)
"""Keys of architectures (without their name) and of tokenizers that change neither numbers nor text."""


class Metadata:
    """Values by key. Its methods raise ModelError for a value of another kind than its reader expects."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:  # Any: as the file has them
        self.path = path
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def whole(self, key: str, default: int) -> int:
        value = self.same(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise self.refusal(key, "a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.same(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refusal(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "a list of texts")

    def numbers(self, key: str) -> list[float]:
        return [float(each) for each in self._list(key, (int, float), "a list of numbers")]

    def wholes(self, key: str) -> list[int]:
        return self._list(key, int, "a list of whole numbers")

    def raw(self, key: str) -> Any:  # Any: as above
        return self._value(key)

    def refusal(self, key: str, expected: str) -> ModelError:
        shown = repr(self._values[key])
        return ModelError(
            f"{self.path} has {key} = {shown if len(shown) < 60 else shown[:60] + '...'} and {expected} is expected: "
            "get the file again, or use the model in safetensors"
        )

    def mark(self, keys: Iterable[str]) -> None:
        """Mark `keys` as read, or as needing no reading."""
        self._read.update(keys)

    def unread(self, prefix: str) -> dict[str, Any]:  # Any: as above
        """The values whose keys begin with `prefix`, which nobody has read and which may matter: by key without the
        prefix.
        """
        left = {key: value for key, value in self._values.items() if key.startswith(prefix) and key not in self._read}
        names = {key.removeprefix(prefix): (key, value) for key, value in left.items()}
        return {name: value for name, (key, value) in names.items() if key not in _HARMLESS and name not in _HARMLESS}

    def _value(self, key: str) -> Any:  # Any: as above
        self._read.add(key)
        return self._values.get(key)

    def same(self, key: str) -> Any:  # Any: as above
        """A list has an entry for each block. One number for all is all that configs have."""
        value = self._value(key)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(
                f"{self.path} has a {key} that differs between blocks, which is not supported: "
                "use the model in safetensors"
            )
        return value[0]

    def _list(self, key: str, kind: type | tuple[type, ...], expected: str) -> list[Any]:  # Any: as above
        value = self._value(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.refusal(key, expected)
        return value
