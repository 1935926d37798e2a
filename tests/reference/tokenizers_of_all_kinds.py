"""Small tokenizers of each kind that models have, as `transformers` has them; and some that no model should have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁", "▁Once", "▁upon", "a", "▁a", "b", ".", "▁.", "é", "\N{ZERO WIDTH JOINER}", "ש", "中", "\ufffd"]
WORDS = ["do", "n", "'", "t", "s", "##s", "m", "ve", "##ve", "re", ".", "##.", ",", "!", "hello", "##'", "\ufffd", "a'"]
BYTES_LEVEL = bytes_to_unicode()


def of_bytes(text: str) -> str:
    """The text as byte-level BPE writes it."""
    return "".join(BYTES_LEVEL[byte] for byte in text.encode())


def _finished(made: Tokenizer, decoder: Any, *, cleanup: bool = False) -> Any:  # Any: of tokenizers; of transformers
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken("<think>", special=False), AddedToken(" é", special=False)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=cleanup, **special)


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys([*SPECIAL, *tokens]))}


def byte_level() -> Any:
    words = [*BYTES_LEVEL.values(), *map(of_bytes, (" hello", "\ufffd", "🤦", "中", "👩\N{ZERO WIDTH JOINER}"))]
    made = Tokenizer(models.BPE(_vocabulary(words), [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _finished(made, decoders.ByteLevel())


def byte_fallback(*steps: Any) -> Any:
    made = Tokenizer(models.BPE(_vocabulary([*BYTES, *PIECES]), [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _finished(made, decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *steps]))


def unigram() -> Any:
    made = Tokenizer(models.Unigram([(token, -1.0) for token in _vocabulary(PIECES)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return _finished(made, decoders.Metaspace())


def words(decoder: Any, *, cleanup: bool) -> Any:
    made = Tokenizer(models.WordPiece(_vocabulary(WORDS), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _finished(made, decoder, cleanup=cleanup)


def words_in_bytes() -> Any:
    said = map(of_bytes, (*WORDS, " ", " '", " n", "'t"))
    made = Tokenizer(models.WordLevel(_vocabulary([*BYTES_LEVEL.values(), *said]), unk_token="<unk>"))
    return _finished(made, decoders.ByteLevel(), cleanup=True)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level,
    "Llama 2": lambda: byte_fallback(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "Gemma": lambda: byte_fallback(decoders.Fuse()),
    "byte fallback, two spaces": lambda: byte_fallback(decoders.Fuse(), decoders.Strip(" ", 2, 0)),
    "T5": unigram,
    "BERT": lambda: words(decoders.WordPiece(), cleanup=True),
    "BERT without cleanup": lambda: words(decoders.WordPiece(cleanup=False), cleanup=False),
    "words after a fuse": lambda: words(decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), cleanup=False),
    "no decoder": lambda: words(None, cleanup=False),
    "no decoder, cleanup": lambda: words(None, cleanup=True),
    "ends of words": lambda: words(decoders.BPEDecoder(suffix="'"), cleanup=False),
    "CTC": lambda: words(decoders.CTC("n", "s"), cleanup=True),
    "bytes and cleanup": words_in_bytes,
    "a pattern over all of the text": lambda: words(
        decoders.Sequence([decoders.WordPiece(), decoders.Fuse(), decoders.Replace(Regex("^(.*)t$"), "t")]),
        cleanup=False,
    ),
}
UNSETTLED = {"a pattern over all of the text"}
"""Nothing is known about these before the end."""
