"""A model that needs no swarm, for what is around it: it says the same few tokens, whatever it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from llmnode.core.model import ModelInfo
from llmnode.core.traffic import Traffic
from llmnode.errors import ConfigError, PeerUnreachable, SessionLost
from llmnode.models.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.models.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 64
END = 0
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
FAIL, INTERRUPT, REFUSED = "fail!", "stop!", "refused!"
"""Words of a prompt that have an answer go wrong in the middle."""


def canned_tokenizer(folder: Path) -> Tokenizer:
    """A token a byte, and the end. It is saved in `folder`."""
    made = tokenizers.Tokenizer(
        models.BPE({"<end>": END, **{char: 1 + at for at, char in enumerate(sorted(ALPHABET))}}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=template).save_pretrained(folder)
    as_folder: Any = SimpleNamespace(path=folder, name="canned")
    return load_tokenizer(as_folder)


class CannedCache:
    """The part of a cache that the dialogue and the receipts use."""

    def __init__(self) -> None:
        self.length = 0

    def positions(self, _row: int) -> int:
        return self.length

    def get_seq_length(self) -> int:
        return self.length

    def truncate(self, length: int) -> None:
        self.length = length

    def transcripts(self) -> list[dict[str, str]]:
        return [{"format": "canned"}]

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> CannedCache:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class CannedModel:
    """Says `says`, and then its end."""

    route = ("hop",)

    def __init__(self, tokenizer: Tokenizer, says: str = "é 好", **generation_config: Any) -> None:
        self.tokenizer = tokenizer
        self.info = ModelInfo("canned", bytes(32), 2, 8, CONTEXT_TOKENS, "float32")
        self.generation_config = GenerationConfig(**{"eos_token_id": END, **generation_config})
        self.traffic = Traffic(0, 0, 0, 0)
        self.options: list[dict[str, Any]] = []
        """The options of each call of `generate`."""
        self.lengths: list[int] = []
        """The lengths of the caches."""
        self._says = self.tokenizer.encode(says)

    def check_tokens(self, _token_ids: Sequence[int]) -> None:
        """All are in the vocabulary."""

    def __enter__(self) -> CannedModel:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""

    def open_cache(self, max_length: int, **_options: Any) -> CannedCache:
        assert 1 <= max_length <= CONTEXT_TOKENS
        self.lengths.append(max_length)
        return CannedCache()

    def generate(self, inputs: torch.Tensor, *, streamer: Any, cache: CannedCache, **options: Any) -> torch.Tensor:
        self.options.append(options)
        prompt = inputs[0].tolist()
        said = [*self._says, END][: options["max_new_tokens"]]
        if REFUSED in self.tokenizer.decode(prompt):
            raise ConfigError("this model does not take this")
        streamer.put(inputs)
        for number, token_id in enumerate(said):
            if number == 1 and FAIL in self.tokenizer.decode(prompt):
                raise SessionLost([PeerUnreachable("it is gone")])
            if number == 1 and INTERRUPT in self.tokenizer.decode(prompt):
                raise KeyboardInterrupt
            streamer.put(torch.tensor([token_id]))
        streamer.end()
        cache.length = len(prompt) + len(said) - 1
        return torch.tensor([[*prompt, *said]])


class _Beginning:
    def cache(self, _max_length: int) -> CannedCache:
        return CannedCache()


def canned_beginnings(_model: Any, prompts: Sequence[Sequence[int]], _samples: int) -> list[Any]:
    """For `several.beginnings`: nothing is shared."""
    return [_Beginning() for _ in prompts]
