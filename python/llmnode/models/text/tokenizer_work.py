"""A tokenizer's description, tokenizer.json, which is a program of a kind: refused if it may not end, or fill memory.

A tokenizer is a chain of steps. Each may replace text by longer text, so that a few steps make a text of any length.
Steps with a regex may look at a text for years (`regex_work.py`). Nobody can stop a tokenizer that is at work, and a
process of its own would make each text slower. So the description is looked at before anything is done with it: it
gives a limit for the text's growth and for the work on it. Models' own tokenizers are far below these limits.
"""

from __future__ import annotations

import base64
import binascii
import json
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any, TypeAlias

from llmnode.errors import ModelError
from llmnode.models.sources.damage import read_whole
from llmnode.models.text.regex_work import TEXT, RegexTooHard, Work, work_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

_MOST_STEPS = 32
_MOST_GROWTH = 16
"""How many times as long as the text each chain may make it. Those of models replace a character by one."""
_MOST_WORK = 32
"""The most ways in which the regexes of a chain may try at one place, as a multiple of the text's length. Those of
models have up to 8: the rest is for several of them."""
_LONGEST_TOKEN = 4096
_LONGEST_PART = 64
"""The most bytes that are written for one character, before a text or beside each token, and tokens around a text."""
_LONGEST_WORD = 1000
"""WordPiece tries each part of a word: its work grows with the cube of this."""

_CHAINS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""The chains of steps, and where a step that is a sequence has its own."""
_HARMLESS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip"),
    *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "UnicodeScripts"),
    *("Whitespace", "WhitespaceSplit"),
    *("BertProcessing", "RobertaProcessing"),
    *("ByteFallback", "Fuse"),
}
"""Steps that cut, shorten, or replace a character by a few once: a second one finds nothing to do."""
_GROWTHS = {"BertNormalizer": 3, "ByteLevel": 4, "Metaspace": 2, "WordPiece": 2}
"""Steps that may write several characters for each, also the second time, and how many."""

_Step: TypeAlias = "Mapping[str, Any]"  # Any: JSON


class TooMuchWork(Exception):
    """The description has no limit for growth or work, or one that is too high. Its words go on after "it"."""


def check_work(described: _Step) -> None:
    """Check the content of a tokenizer.json, or its chains alone. Raises TooMuchWork."""
    try:
        for name, inner in _CHAINS.items():
            _check_chain(list(_flat(described.get(name), inner)))
        _check_model(described.get("model") or {})
        _check_tokens(token["content"] for token in described.get("added_tokens") or ())
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error, RecursionError) as error:
        raise TooMuchWork(f"has steps that are not as tokenizers describes them ({type(error).__name__})") from error


def check_files(folder: Path) -> None:
    """Check each file that transformers may take as tokenizer.json. Raises TooMuchWork, and OSError or ValueError for
    one that cannot be read: tokenizers might read it.
    """
    named = _read(folder / "tokenizer_config.json").get("fast_tokenizer_files") or ()
    names = {"tokenizer.json", *(file.name for file in folder.glob("tokenizer.*.json")), *map(str, named)}
    for name in sorted(names):
        if described := _read(folder / name):
            check_work(described)


def check_loaded(tokenizer: Any) -> None:  # Any: transformers types its tokenizers so
    """Check the chains and tokens of a tokenizer as transformers has made it, of whatever files. Raises TooMuchWork."""
    _check_tokens(tokenizer.get_vocab())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {name: getattr(backend, name, None) for name in _CHAINS}
    check_work({name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None})


@contextmanager
def panics_as_errors(name: str) -> Iterator[None]:
    """Turns a panic of tokenizers, which is no Exception, into a ModelError about the model `name`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it has no name that could be imported
            raise
        raise ModelError(
            f"the tokenizer of {name} breaks down ({' '.join(str(error).split())[:200]}); "
            "give token ids, or use another model"
        ) from error


def _read(file: Path) -> _Step:
    """A JSON object, empty where there is none. Raises as `check_files`."""
    try:
        described = json.loads(read_whole(file), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise TooMuchWork("has too many things in each other") from error
    return described if isinstance(described, dict) else {}


def _flat(step: _Step | None, inner: str) -> Iterator[_Step]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[inner]:
        yield from _flat(each, inner)


def _check_chain(steps: Sequence[_Step]) -> None:
    if len(steps) > _MOST_STEPS:
        raise TooMuchWork(f"has {len(steps)} steps in a row, and {_MOST_STEPS} are the most")
    if sum(step["type"] == "Precompiled" for step in steps) > 1:
        raise TooMuchWork("has more than one table of characters (Precompiled)")
    growth, work = 1.0, 0.0
    for step in steps:
        pattern = _pattern(step)
        work += growth * growth * pattern.ways / TEXT  # at each place of the text, as it is then
        growth *= _growth(step, pattern)
    if growth > _MOST_GROWTH:
        raise TooMuchWork(f"may make a text {growth:.3g} times as long, and {_MOST_GROWTH} is the most")
    if work > _MOST_WORK:
        raise TooMuchWork("has a regex that may take hours for a page of text, or several such")


def _pattern(step: _Step) -> Work:
    match step.get("pattern"):
        case {"Regex": str(regex)}:
            try:
                return work_of(regex)
            except RegexTooHard as error:
                raise TooMuchWork(f"has a regex {error}, and may take hours for a page of text") from error
        case {"String": str(text)}:
            return Work(1, len(text))
        case None:
            return Work(0, 1)
    raise ValueError


def _growth(step: _Step, pattern: Work) -> float:
    kind = step["type"]
    if kind == "Split" or kind in _HARMLESS:
        return 1
    if kind in _GROWTHS:
        return _GROWTHS[kind]
    match kind:
        case "Replace":
            return max(1, len(step["content"]) / pattern.shortest) if pattern.shortest else 1 + len(step["content"])
        case "Prepend":
            return 1 + len(step["prepend"])
        case "Precompiled":
            return _growth_of_table(base64.b64decode(step["precompiled_charsmap"]))
        case "BPEDecoder":
            return 1 if step["suffix"] else 2
        case "CTC":
            return 1 if step["pad_token"] and step["word_delimiter_token"] else 2
        case "TemplateProcessing":
            return _growth_of_template(step)
    raise TooMuchWork(f"has a step that llmnode does not know ({str(kind)[:40]!r})")


def _growth_of_table(table: bytes) -> float:
    """1 for tables that write up to `_LONGEST_PART` bytes for a character: some Arabic ones have 33, and not often."""
    written = table[4 + int.from_bytes(table[:4], "little") :]  # after the trie, whose length is first
    return max(1, ceil(max(map(len, written.split(b"\0"))) / _LONGEST_PART))


def _growth_of_template(step: _Step) -> float:
    """The template may say the text several times."""
    around = sum(len(token["ids"]) for token in step["special_tokens"].values())
    if max(around, len(step["single"])) > _LONGEST_PART:
        raise TooMuchWork(f"adds more than {_LONGEST_PART} tokens to a text")
    return max(1, sum("Sequence" in piece for piece in step["single"]))


def _check_model(model: _Step) -> None:
    vocabulary = model.get("vocab") or ()
    _check_tokens(vocabulary if isinstance(vocabulary, dict) else (token[0] for token in vocabulary))
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(name) or "") > _LONGEST_PART:
            raise TooMuchWork(f"has a {name} of more than {_LONGEST_PART} characters")
    if (model.get("max_input_chars_per_word") or 0) > _LONGEST_WORD:
        raise TooMuchWork(f"takes words of more than {_LONGEST_WORD} characters (max_input_chars_per_word)")


def _check_tokens(tokens: Iterable[str]) -> None:
    if max(map(len, tokens), default=0) > _LONGEST_TOKEN:
        raise TooMuchWork(f"has a token of more than {_LONGEST_TOKEN} characters")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    """A step that says something twice could mean one thing here, and another to tokenizers."""
    found = dict(pairs)
    if len(found) < len(pairs) and "type" in found:
        raise TooMuchWork("has a step that says something twice")
    return found
