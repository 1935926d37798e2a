"""The tokenizer that a GGUF file describes, and the tokens at which its model ends.

transformers builds it. Some parts that it leaves out are added as llama.cpp, whose format it is, reads them: control
tokens that are not spelled in bytes, words that need no merges, whether a space comes first, how a text is cut into
words, and named chat templates.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from llmnode.models.gguf.metadata import Metadata

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KINDS = ("gpt2", "llama")

_TURN_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
    *("<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>"),
    *("<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
"""Texts of tokens that end a generation in llama.cpp, whatever the metadata says: many files name one of several."""

_DIGITS_APART = {
    *("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"),
}
_AS_GPT2 = {
    *("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es", "jina-v2-de"),
    *("jina-v2-es", "mellum", "modern-bert", "mpt", "olmo", "phi-2", "trillion"),
}
_SAME_WORDS = {
    **dict.fromkeys(("chatglm-bpe", "glm4"), "llama3"),
    **dict.fromkeys(("grok-2", "hunyuan", "solar-open", "stablelm2"), "qwen2"),
}
"""Names (`tokenizer.ggml.pre`) for ways to cut a text into words, beside those that transformers knows."""
_WHOLE_WORDS = {
    *(
        "falcon-h1",
        "falcon3",
        "jina-v5-nano",
        "lfm2",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "midm-2.0",
        "pixtral",
        "tekken",
    ),
}
"""Here a word of the vocabulary is a token even if no merges lead to it, and a text begins with bos."""


class GgufTokenizer:
    """The tokens by the file's metadata. Raises ModelError if it contradicts itself or its kind is not supported."""

    def __init__(self, metadata: Metadata, architecture: str, notes: list[str]) -> None:
        self._metadata = metadata
        self._architecture = architecture
        self._kind = metadata.text(f"{_KEY}model", "")
        if self._kind not in _KINDS:
            raise self._refuse(f"a tokenizer of the kind {self._kind or 'none'!r}, and {' and '.join(_KINDS)} are read")
        self.tokens = self._read_tokens()
        self._types = self._read_types()
        self._pre = metadata.text(f"{_KEY}pre", "gpt-2") if self._kind == "gpt2" else ""
        metadata.mark([f"{_KEY}pre"])
        self._ids = self._read_ids()
        self.end_ids = self._read_ends()
        self._notes = notes

    def build(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        backend = self._spm() if self._kind == "llama" else self._byte_level()
        self._add_tokens(backend)
        named = {name: self.tokens[index] for name, index in self._ids.items() if name.endswith("_token")}
        adds = self._read_adds(named)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{**_NO_TOKENS, **named}, **adds)
        if template := self._read_templates():
            tokenizer.chat_template = template
        if len(tokenizer) > len(self.tokens):
            raise self._refuse("special tokens that are not in its vocabulary")
        return tokenizer

    def suppressed(self) -> list[int]:
        """Tokens that are never chosen."""
        listed = self._metadata.wholes(f"{_KEY}suppress_tokens")
        return [index for index in listed if 0 <= index < len(self.tokens)]

    def _read_tokens(self) -> list[str]:
        tokens = self._metadata.texts(f"{_KEY}tokens")
        if not tokens:
            raise self._refuse(f"no {_KEY}tokens")
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        if repeated := next((token for token, count in Counter(tokens).items() if count > 1), None):
            raise self._refuse(f"the token {repeated!r} twice")
        return tokens

    def _read_types(self) -> list[int]:
        types = self._metadata.wholes(f"{_KEY}token_type") or [1] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise self._refuse(f"{len(types)} types ({_KEY}token_type) of {len(self.tokens)} tokens")
        return types

    def _read_ids(self) -> dict[str, int]:
        """The ids of special tokens, by transformers' names or, if it has none, by the file's."""
        defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} if self._kind == "llama" else {}
        found: dict[str, int] = {}
        for key, name in _SPECIAL.items():
            default = defaults.get(key, -1)
            index = self._metadata.whole(f"{_KEY}{key}", 0) if f"{_KEY}{key}" in self._metadata else default
            if index >= len(self.tokens):
                raise self._metadata.refusal(f"{_KEY}{key}", f"one of {len(self.tokens)} tokens")
            if index >= 0:
                found[name] = index
        return found

    def _read_ends(self) -> list[int]:
        """eos, eot and eom, and the tokens that end a generation by their text or by their use in infilling."""
        named = [self._ids[name] for name in _ENDS if name in self._ids]
        by_text = [index for index, token in enumerate(self.tokens) if token in _TURN_ENDS]
        return list(dict.fromkeys([*named, *by_text]))

    def _read_adds(self, named: dict[str, str]) -> dict[str, bool]:
        """Whether encoding adds tokens. The default is that of the vocabulary's kind."""
        adds = {
            "add_bos_token": self._metadata.flag(
                f"{_KEY}add_bos_token", self._kind == "llama" or self._pre in _WHOLE_WORDS
            ),
            "add_eos_token": self._metadata.flag(f"{_KEY}add_eos_token", False),
        }
        if self._metadata.flag(f"{_KEY}add_sep_token", False):
            raise self._refuse(f"a text that ends with a separator ({_KEY}add_sep_token)")
        for name, added in adds.items():
            if added and name.removeprefix("add_") not in named:
                if f"{_KEY}{name}" in self._metadata:
                    self._notes.append(f"{_KEY}{name} is set and there is no such token: nothing is added")
                adds[name] = False
        return {name: added for name, added in adds.items() if added or f"{_KEY}{name}" in self._metadata}

    def _read_templates(self) -> str | dict[str, str] | None:
        """The one, or if others have names, all by their names. transformers reads the one alone."""
        prefix = "tokenizer.chat_template"
        one = self._metadata.text(prefix, "")
        names = set(self._metadata.texts("tokenizer.chat_templates"))
        names |= set(self._metadata.unread(f"{prefix}."))
        named = {name: self._metadata.text(f"{prefix}.{name}", "") for name in sorted(names)}
        named = {name: template for name, template in named.items() if template}
        if not named:
            return one or None
        return {"default": one, **named} if one else named

    def _spm(self) -> Any:  # Any: of the package tokenizers
        from tokenizers import normalizers
        from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs
        from transformers.models.llama.tokenization_llama import LlamaTokenizer

        scores = self._metadata.numbers(f"{_KEY}scores")
        described: dict[str, Any] = {"tokens": self.tokens, "scores": scores}  # Any: as transformers reads it
        if merges := self._merges():
            described["merges"] = [" ".join(merge) for merge in merges]
        elif len(scores) != len(self.tokens):
            raise self._refuse(f"{len(scores)} scores ({_KEY}scores) of {len(self.tokens)} tokens")
        spaced = self._metadata.flag(f"{_KEY}add_space_prefix", True)
        if (builder := theirs.GGUF_SENTENCEPIECE_BUILDERS.get(self._architecture)) is None:
            # transformers puts a space before every text, whatever the file says.
            tokenizer_class: Any = partial(LlamaTokenizer, add_prefix_space=spaced, **_NO_TOKENS)  # Any: a class
            built: Any = theirs.sentencepiece_tokenizer  # Any: not typed
            backend = built(described, tokenizer_class).backend_tokenizer
        else:
            theirs_built: Any = builder  # Any: not typed
            backend = theirs_built(described).backend_tokenizer
            if not spaced and self._architecture == "phi3":
                backend.normalizer = normalizers.Replace(" ", "▁")
        if (unknown := self._ids.get("unk_token")) is not None:
            backend.model.unk_token = self.tokens[unknown]
        return backend

    def _byte_level(self) -> Any:  # Any: likewise
        from transformers.convert_slow_tokenizer import bytes_to_unicode
        from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

        self._metadata.mark([f"{_KEY}add_space_prefix", f"{_KEY}scores"])  # of SPM's vocabularies
        if f"{_KEY}merges" not in self._metadata:
            raise self._refuse(f"no {_KEY}merges")
        merges: Any = self._merges()  # Any: its type says texts
        spelling = bytes_to_unicode()
        alphabet = set(spelling.values())

        def spelled(token: str, kind: int) -> str:
            # Control tokens are matched as they are written. transformers would spell them in bytes, and cut them.
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or set(token) <= alphabet:
                return token
            return "".join(spelling[byte] for byte in token.encode())

        vocabulary = {spelled(*each): index for index, each in enumerate(zip(self.tokens, self._types, strict=True))}
        backend = GPT2Tokenizer(vocab=vocabulary, merges=merges, **_NO_TOKENS).backend_tokenizer
        self._cut_words(backend)
        backend.model.ignore_merges = self._pre in _WHOLE_WORDS
        return backend

    def _merges(self) -> list[tuple[str, str]]:
        found = []
        for merge in self._metadata.texts(f"{_KEY}merges"):
            first, _space, second = merge.partition(" ")
            if not first or not second or " " in second:
                raise self._refuse(f"the merge {merge!r} ({_KEY}merges), which is not of two tokens")
            found.append((first, second))
        return found

    def _cut_words(self, backend: Any) -> None:  # Any: likewise
        from tokenizers import Regex, pre_tokenizers
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        if self._pre in _AS_GPT2:
            return
        if self._pre in _DIGITS_APART:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
            return
        split = GGUF_PRE_TOKENIZER_SPLITS.get(_SAME_WORDS.get(self._pre, self._pre))
        if split is None:
            self._notes.append(
                f"{_KEY}pre = {self._pre[:40]!r} is not known: text is cut into words as GPT-2 does, "
                "and some of its tokens may be others"
            )
            return
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), bytes_alone])

    def _add_tokens(self, backend: Any) -> None:  # Any: likewise
        """Add the tokens that are matched whole in a text, before it is cut into words. Special ones are not shown."""
        from tokenizers import AddedToken

        ends = set(self.end_ids)
        known = backend.get_vocab()
        special, plain = [], []
        for index, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True)):
            if known.get(token) != index:
                continue  # of Gemma's, spaces are spelled otherwise there, and found by merges
            if kind in (_UNKNOWN, _CONTROL) or index in ends:
                special.append(AddedToken(token, normalized=False, special=True))
            elif kind == _USER_DEFINED:
                plain.append(AddedToken(token, normalized=False, special=False))
        backend.add_special_tokens(special)
        backend.add_tokens(plain)

    def _refuse(self, what: str) -> ModelError:
        return ModelError(f"{self._metadata.path} has {what}: get the file again, or use the model in safetensors")


_NO_TOKENS: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "unk_token"))
"""transformers has defaults, which are no tokens of this vocabulary."""

_ENDS = ("eos_token", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPECIAL = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "seperator_token_id": "sep_token",
    "mask_token_id": "mask_token",
    "eot_token_id": "eot",
    "eom_token_id": "eom",
    "fim_pad_token_id": "fim_pad",
    "fim_rep_token_id": "fim_rep",
    "fim_sep_token_id": "fim_sep",
}
