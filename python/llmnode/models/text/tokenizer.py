"""Text to token ids and back, by the model's own tokenizer."""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmnode.core.user_input import is_yes
from llmnode.errors import ConfigError, ModelError
from llmnode.models.gguf.convert import is_converted_folder
from llmnode.models.text.chat_template import ChatTemplate
from llmnode.models.text.decoding import reach_of
from llmnode.models.text.template_process import TemplateFailed
from llmnode.models.text.tokenizer_files import check_found, what_is_wrong
from llmnode.models.text.tokenizer_work import TooMuchWork, check_files, check_loaded, panics_as_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from llmnode.models.sources.folder import ModelFolder
    from llmnode.models.text.decoding import UnsettledEnd

_BYTE = re.compile("<0x..>")
"""A token that is a single byte, as byte fallback has it."""
TRUST = "LLMNODE_TRUST_TOKENIZER"
"""The variable that leaves the check of tokenizers out, for those whose files are trusted."""
_OTHER_FILE = f"use the tokenizer.json of the model's publisher, or set {TRUST}=1 if you trust this one"
_OTHERWISE = "use generate without --chat, or another model"


class Tokenizer:
    """A model's tokenizer and chat template. `name` is the model's.

    Token ids alone need no tokenizer. So a model without one can be used. Calls that need text then raise the
    ModelError of its loading.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:  # Any: transformers types its tokenizers so
        self._loaded = tokenizer
        self._name = name

    @property
    def is_there(self) -> bool:
        """Whether the model has one that can be used."""
        return not isinstance(self._loaded, ModelError)

    @property
    def loaded(self) -> Any:  # Any: transformers types its tokenizers so
        """transformers' own tokenizer. Raises ModelError if there is none."""
        return self._tokenizer

    @property
    def _tokenizer(self) -> Any:
        if isinstance(self._loaded, ModelError):
            raise ModelError(str(self._loaded)) from self._loaded
        return self._loaded

    def panics_as_errors(self) -> AbstractContextManager[None]:
        """For code that uses `loaded`: tokenizers' panics, which are no Exceptions, become ModelErrors."""
        return panics_as_errors(self._name)

    def encode(self, text: str) -> list[int]:
        with self.panics_as_errors():
            return list(self._tokenizer(text).input_ids)

    def encode_dialogue(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """The prompt for the next answer in a dialogue of (role, text), in the model's chat template.

        The template writes all special tokens, the first one too. Raises ConfigError, in one line, if the model has no
        template or that makes no prompt of this dialogue; it is given seconds, and no more memory than a text needs.
        """
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            prompt = self._chat_template.render(messages, self._tokenizer.special_tokens_map)
        except TemplateFailed as failed:
            raise ConfigError(f"the chat template of {self._name} {failed}; {_OTHERWISE}") from failed
        with self.panics_as_errors():
            return list(self._tokenizer(prompt, add_special_tokens=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The same as transformers' decoding without special tokens; ids that the tokenizer does not know say
        nothing.
        """
        with self.panics_as_errors():
            text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    @cached_property
    def reach(self) -> UnsettledEnd:
        """How far back later tokens may change the text that `decode` has made of earlier ones."""
        return reach_of(self._tokenizer)

    def is_silent(self, token_id: int) -> bool:
        """Whether `decode` leaves it out, as special or unknown. Only where `reach` is known."""
        return token_id in self._special_ids or self.token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether it may be a byte of byte fallback."""
        return _BYTE.fullmatch(self.token(token_id) or "") is not None

    def token(self, token_id: int) -> str | None:
        """How the vocabulary writes it; None if it is not there, or nobody knows."""
        if isinstance(self._loaded, ModelError) or not 0 <= token_id < 2**31:  # others overflow in Rust
            return None
        try:
            token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        except (LookupError, ValueError, TypeError):  # as tokenizers that are written in Python have it
            return None
        return token

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        """Raises ConfigError if there is none for a dialogue without tools."""
        found, why = self._tokenizer.chat_template, ""
        if isinstance(found, dict):  # as transformers' `get_chat_template` chooses
            why = f", only templates for other uses ({', '.join(sorted(map(str, found)))})"
            found = found.get("default")
        if not found or not isinstance(found, str):
            raise ConfigError(f"{self._name} has no chat template{why}; {_OTHERWISE}")
        return ChatTemplate(found)


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The folder's tokenizer. Raises ModelError with advice, in one line, if none can be used.

    A tokenizer whose work has no known limit is refused, unless `LLMNODE_TRUST_TOKENIZER` is set.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer would build Qwen2's by its own rules, and not by the tokenizer.json that we made of a GGUF file.
    theirs: Any = PreTrainedTokenizerFast if is_converted_folder(folder.path) else AutoTokenizer  # Any: two classes
    is_trusted = is_yes(os.environ.get(TRUST))
    try:
        if not is_trusted:
            check_files(folder.path)  # before tokenizers reads them: it encodes some tokens then
        with panics_as_errors(folder.name):
            loaded = theirs.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
        if not is_trusted:
            check_loaded(loaded)
    except TooMuchWork as error:
        raise ModelError(f"{folder.path} has no usable tokenizer: it {error}; {_OTHER_FILE}") from error
    except Exception as error:  # transformers and tokenizers raise nothing narrower
        raise ModelError(f"{folder.path} has no usable tokenizer: {what_is_wrong(folder.path, error)}") from error
    check_found(folder.path)
    return Tokenizer(loaded, folder.name)


def find_tokenizer(folder: ModelFolder) -> Tokenizer:
    """Like `load_tokenizer`, for callers that may need none: using it raises the ModelError."""
    try:
        return load_tokenizer(folder)
    except ModelError as error:
        return Tokenizer(error, folder.name)
