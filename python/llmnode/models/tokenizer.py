"""Text to token ids and back, by the model's own tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmnode.errors import ConfigError, ModelError
from llmnode.models.damage import require_content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.models.folder import ModelFolder

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
"""What a tokenizer is read from, as far as it is there, and is never empty."""


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:  # Any: transformers types its tokenizers so
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def encode_dialogue(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """The prompt for the next answer in a dialogue of (role, text), in the model's chat template.

        Raises ConfigError if the model has none.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError("this model has no chat template: use generate without --chat")
        messages = [{"role": role, "content": text} for role, text in turns]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(prompt, add_special_tokens=False).input_ids)

    def decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    from transformers import AutoTokenizer

    require_content(folder.path / name for name in _FILES)
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"{folder.path} has no usable tokenizer: {' '.join(str(error).split())}") from error


class TextStream:
    """Token ids in, the text that they add out: a character of several tokens is held until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._shown = ""

    def add(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids)
        if text.endswith("�"):  # half a character
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What was held back and will not become whole."""
        return self._take(self._tokenizer.decode(self._token_ids))

    def _take(self, text: str) -> str:
        added, self._shown = text[len(self._shown) :], text
        return added
