"""The law of an answer's text: pieces joined, the text at once, and what decoding the whole adds are the same."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.models.text.streaming import TextStream, answer_text
from llmnode.models.text.tokenizer import Tokenizer
from reference.tokenizers_of_all_kinds import BYTES, BYTES_LEVEL, KINDS, UNSETTLED, of_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.reference
HALF = "\N{REPLACEMENT CHARACTER}"
UNKNOWN = 3  # ids after the last one, as a padded vocabulary has them


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), kind)


@cache
def ids_of(kind: str) -> list[int]:
    """All that there are, and some that are not; bytes of some characters often."""
    loaded: Any = tokenizer_of(kind)._loaded
    ids = list(range(len(loaded) + UNKNOWN))
    some = "🤦é中".encode()
    written = [*(BYTES[byte] for byte in some), *(BYTES_LEVEL[byte] for byte in some)]
    likely = [each for each in map(loaded.convert_tokens_to_ids, written) if each]
    others = [each for each in ids if (loaded.convert_ids_to_tokens(each) or "") not in BYTES]
    return [*ids, *2 * likely, *(others if len(others) < len(ids) else [])]


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    tokens = st.lists(st.sampled_from(ids_of(kind)), max_size=24)
    return kind, draw(tokens), draw(tokens)


def pieces_of(stream: TextStream, answer: Sequence[int]) -> list[str]:
    return [*map(stream.add, answer), stream.finish()]


def ids(kind: str, *tokens: str) -> list[int]:
    found: list[int] = tokenizer_of(kind)._loaded.convert_tokens_to_ids(list(tokens))
    return found


@pytest.mark.parametrize("window", [4, 64])
@given(texts())
@settings(settings.get_profile("reference"), max_examples=600)
def test_the_pieces_of_an_answer_are_what_decoding_the_whole_adds(
    window: int, text: tuple[str, list[int], list[int]]
) -> None:
    kind, prompt, answer = text
    tokenizer = tokenizer_of(kind)
    with patch("llmnode.models.text.streaming._WINDOW", window):
        pieces = pieces_of(TextStream(tokenizer, prompt), answer)
    assert "".join(pieces) == answer_text(tokenizer, prompt, answer)
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *answer])
    assert whole.endswith("".join(pieces))
    if whole.startswith(before):
        assert before + "".join(pieces) == whole
    if not tokenizer.reach.characters:
        assert not any(piece.endswith(HALF) for piece in pieces[:-1])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_long_answer_is_decoded_in_windows_and_comes_as_it_is_said(kind: str) -> None:
    tokenizer, chance = tokenizer_of(kind), random.Random(kind)
    prompt, answer = ([chance.choice(ids_of(kind)) for _ in range(count)] for count in (700, 1500))
    decoded: list[int] = []
    decode = tokenizer.decode

    def counted(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    with patch.object(tokenizer, "decode", counted):
        pieces = pieces_of(TextStream(tokenizer, prompt), answer)
    assert "".join(pieces) == answer_text(tokenizer, prompt, answer)
    assert sum(decoded) < 100 * len(answer) + 10 * len(prompt), "for each token a window, and not all that was said"
    if kind in UNSETTLED:
        assert not any(pieces[:-1])
    else:
        assert len(pieces[-1]) < 100


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "pieces"),
    [
        ("Llama 2", ["▁Once", "▁upon"], ["▁a", "b"], [" a", "b", ""]),
        ("Llama 2", [], ["▁Once", "▁upon"], ["Once", " upon", ""]),
        ("Llama 2", ["a"], ["<0xC3>", "<0xA9>", "<s>", "b"], ["", "", "", "éb", ""]),
        ("Llama 2", ["a"], ["<0xE2>", "<0x80>"], ["", "", HALF * 2]),
        ("Llama 2", ["a"], ["<0xC3>", "<0xA9>", "<0xFF>", "b"], ["", "", "", f"{HALF * 3}b", ""]),
        ("Llama 2", ["a", "<0xC3>"], ["<0xA9>", "b"], ["", "éb", ""]),
        ("byte-level BPE", [of_bytes(" hello")], [*of_bytes("é!🤦")[:-1]], ["", "é", "!", "", "", "", HALF]),
        ("byte-level BPE", [], [of_bytes(HALF), "a"], ["", f"{HALF}a", ""]),
        ("BERT", ["hello"], ["do", "n", "'", "t"], ["", "", "", "", " don't"]),
        ("BERT", ["do", "n"], ["'", "t"], ["", "", "'t"]),
        ("CTC", ["t", "t"], ["t", "t", "re"], ["", "", "", "re"]),
    ],
)
def test_it_is_held_back_until_it_is_settled(
    kind: str, prompt: list[str], answer: list[str], pieces: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    assert pieces_of(TextStream(tokenizer, ids(kind, *prompt)), ids(kind, *answer)) == pieces


def test_of_a_tokenizer_written_in_python_the_text_comes_at_the_end() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = Tokenizer(ByT5Tokenizer(), "small")
    prompt, answer = tokenizer.encode("hé"), tokenizer.encode("llo é!")
    assert pieces_of(TextStream(tokenizer, prompt), answer) == [*[""] * len(answer), "llo é!"]
