"""The tokenizer of a GGUF file: transformers' where that is right, llama.cpp's reading of the file where it is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from llmnode.errors import ModelError
from llmnode.models.gguf.file import open_file
from llmnode.models.gguf.generation import generation_config_of
from llmnode.models.gguf.tokenizer import GgufTokenizer
from llmnode.models.open_model import open_model
from llmnode.models.text.tokenizer import load_tokenizer
from reference.gguf_files import File, of_any_model
from reference.small import make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.reference

KEY = "tokenizer.ggml."
TURN = "<|im_end|>"
TEXTS = ("hi", "Hi there 1234 ab", "  two  spaces\n\nand é ½ 漢字 👋\t", "<s>hi</s>", "it's DON'T", "")
BYTES = list(bytes_to_unicode().values())


def _vocabulary(*more: tuple[str, int]) -> dict[str, Any]:
    """All bytes, some words, control tokens; and `more`, with their types."""
    typed = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((byte, 1) for byte in BYTES), ("ab", 1), ("Ġt", 1), *more]
    return {
        f"{KEY}model": "gpt2",
        f"{KEY}tokens": [token for token, _ in typed],
        f"{KEY}token_type": [kind for _, kind in typed],
        f"{KEY}merges": ["a b", "Ġ t"],
    }


def _pieces(*more: tuple[str, int]) -> dict[str, Any]:
    """Pieces like SentencePiece's: words with scores, and a token for each byte."""
    typed = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    typed += [(piece, 1) for piece in ("▁", "h", "i", "a", "b", "hi", "▁hi", "ab", "1")]
    typed += more
    return {
        f"{KEY}model": "llama",
        f"{KEY}tokens": [token for token, _ in typed],
        f"{KEY}token_type": [kind for _, kind in typed],
        f"{KEY}scores": [-float(index) for index in range(len(typed))],
        f"{KEY}merges": None,
    }


def _write(path: Path, values: dict[str, Any], architecture: str = "llama") -> Path:
    """No model, but what a tokenizer is read from."""
    tensors = {"token_embd.weight": np.zeros((len(values[f"{KEY}tokens"] or "x"), 64), np.float32)}
    return File(architecture, values, tensors).write(path / "small.gguf")


def _described(path: Path, values: dict[str, Any], architecture: str = "llama") -> tuple[GgufTokenizer, list[str]]:
    notes: list[str] = []
    return GgufTokenizer(open_file(_write(path, values, architecture)).metadata, architecture, notes), notes


def _built(path: Path, values: dict[str, Any], architecture: str = "llama") -> Any:
    """The tokenizer, loaded from the folder that it was saved into."""
    from transformers import PreTrainedTokenizerFast

    described, _ = _described(path, values, architecture)
    described.build().save_pretrained(path / "saved")
    return PreTrainedTokenizerFast.from_pretrained(path / "saved")


def _theirs(path: Path, values: dict[str, Any], architecture: str = "llama") -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, gguf_file=_write(path, values, architecture).name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_bytes_are_encoded_as_by_transformers(pre: str, architecture: str, tmp_path: Path) -> None:
    values = {**_vocabulary(), f"{KEY}pre": pre, f"{KEY}add_bos_token": False}
    ours, theirs = _built(tmp_path, values, architecture), _theirs(tmp_path, values, architecture)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == text


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_pieces_are_encoded_as_by_transformers(architecture: str, tmp_path: Path) -> None:
    more = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<mask>", 4)] if architecture == "gemma2" else []
    ours = _built(tmp_path, _pieces(*more), architecture)
    theirs = _theirs(tmp_path, {**_pieces(*more), f"{KEY}bos_token_id": 1}, architecture)
    for text in TEXTS:
        pieces = ours(text, add_special_tokens=False).input_ids
        assert pieces == theirs(text, add_special_tokens=False).input_ids, text
        assert ours(text).input_ids == [1, *pieces], "transformers 5.22 adds no BOS where the file does not ask for it"
    assert ours.decode(ours("hi ab é").input_ids, skip_special_tokens=True) == "hi ab é"


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_tokens_at_either_end_are_as_the_file_says(
    model: str, bos: bool | None, eos: bool | None, tmp_path: Path
) -> None:
    values = _pieces() if model == "llama" else _vocabulary()
    tokenizer = _built(tmp_path, {**values, f"{KEY}add_bos_token": bos, f"{KEY}add_eos_token": eos})
    begins = bos if bos is not None else model == "llama"
    ids = tokenizer("hi").input_ids
    assert (ids[0] == 1, ids[-1] == 2) == (begins, bool(eos))
    assert ids.count(1) + ids.count(2) == begins + bool(eos)


def test_words_need_no_merges_and_a_text_begins_with_bos_where_llama3_has_it_so(tmp_path: Path) -> None:
    values = {**_vocabulary(("hello", 1)), f"{KEY}pre": "llama-bpe"}
    hello = values[f"{KEY}tokens"].index("hello")
    assert _built(tmp_path, values)("hello").input_ids == [1, hello]
    assert len(_built(tmp_path, {**values, f"{KEY}pre": "gpt-2"})("hello").input_ids) == 5


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact", "command-r"])
def test_digits_are_apart_where_the_vocabulary_was_made_so(pre: str, tmp_path: Path) -> None:
    values = {**_vocabulary(("12", 1)), f"{KEY}pre": pre, f"{KEY}merges": ["a b", "1 2"]}
    tokens = values[f"{KEY}tokens"]
    assert _built(tmp_path, values)("x12").input_ids == [tokens.index("x"), tokens.index("1"), tokens.index("2")]
    values[f"{KEY}pre"] = "gpt-2"
    assert _built(tmp_path, values)("x12").input_ids == [tokens.index("x"), tokens.index("12")]
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert [word for word, _ in digits.pre_tokenize_str("12½")] == ["1", "2", "½"]


def test_a_way_to_cut_words_that_is_not_known_is_told(tmp_path: Path) -> None:
    described, notes = _described(tmp_path, {**_vocabulary(), f"{KEY}pre": "klingon"})
    described.build()
    assert notes == [
        "tokenizer.ggml.pre = 'klingon' is not known: text is cut into words as GPT-2 does, "
        "and some of its tokens may be others"
    ]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_control_and_added_tokens_are_single_in_a_text(model: str, tmp_path: Path) -> None:
    """Also those that no byte-level vocabulary could spell, as DeepSeek's."""
    more = [("<|im_start|>", 3), (TURN, 3), ("<think>", 4), ("<｜User｜>", 3), ("[unused]", 5)]
    values = _pieces(*more) if model == "llama" else _vocabulary(*more)
    values[f"{KEY}add_bos_token"] = False
    tokens = values[f"{KEY}tokens"]
    tokenizer = _built(tmp_path, values)
    ids = tokenizer(f"<|im_start|><think>{TURN}<｜User｜>").input_ids
    assert ids == [tokens.index(token) for token in ("<|im_start|>", "<think>", TURN, "<｜User｜>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>"
    assert len(tokenizer("[unused]").input_ids) > 1
    assert len(tokenizer) == len(tokens)
    assert all(index < len(tokens) for index in tokenizer("<|endoftext|><pad><bos>").input_ids)


def test_spaces_before_a_text_are_as_the_file_says(tmp_path: Path) -> None:
    tokens = _pieces()[f"{KEY}tokens"]
    spaced = _built(tmp_path, _pieces())
    assert spaced("hi").input_ids == [1, tokens.index("▁hi")]
    unspaced = _built(tmp_path, {**_pieces(), f"{KEY}add_space_prefix": False})
    assert unspaced("hi").input_ids == [1, tokens.index("hi")]
    assert unspaced.decode(unspaced(" hi").input_ids, skip_special_tokens=True) == " hi"


ENDS: dict[str, tuple[list[tuple[str, int]], dict[str, str], list[str]]] = {
    "eos alone": ([], {"eos_token_id": "</s>"}, ["</s>"]),
    "eot": ([("<turn>", 3)], {"eos_token_id": "</s>", "eot_token_id": "<turn>"}, ["</s>", "<turn>"]),
    "eot and eom": (
        [("<turn>", 3), ("<message>", 3)],
        {"eos_token_id": "</s>", "eot_token_id": "<turn>", "eom_token_id": "<message>"},
        ["</s>", "<turn>", "<message>"],
    ),
    "by its text": (
        [("<|eot_id|>", 3), ("<|eom_id|>", 3)],
        {"eos_token_id": "</s>"},
        ["</s>", "<|eot_id|>", "<|eom_id|>"],
    ),
    "of a type that hides it": ([("<end_of_turn>", 1)], {"eos_token_id": "</s>"}, ["</s>", "<end_of_turn>"]),
    "the same twice": ([(TURN, 3)], {"eos_token_id": TURN, "eot_token_id": TURN}, [TURN, "</s>"]),
    "filling in": ([("<file>", 3)], {"eos_token_id": "</s>", "fim_sep_token_id": "<file>"}, ["</s>", "<file>"]),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_generation_ends_where_llama_cpp_ends_it(case: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    more, ids, ends = ENDS[case]
    values = _vocabulary(*more)
    tokens = values[f"{KEY}tokens"]
    values |= {f"{KEY}{name}": tokens.index(token) for name, token in ids.items()}
    file = open_file(_write(tmp_path, values))
    described = GgufTokenizer(file.metadata, "llama", [])
    made = generation_config_of(file, LlamaConfig(), described, [])
    expected = [tokens.index(token) for token in ends]
    assert made.eos_token_id == (expected if len(expected) > 1 else expected[0])
    assert described.build().decode(expected, skip_special_tokens=True) == ""


def test_samplers_that_its_makers_recommend_are_in_its_generation_config(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 2}
    values = {f"general.sampling.{name}": value for name, value in sampling.items()}
    values[f"{KEY}suppress_tokens"] = [5, 7]
    file = open_file(_write(tmp_path, {**_vocabulary(), **values}))
    notes: list[str] = []
    made = generation_config_of(file, LlamaConfig(), GgufTokenizer(file.metadata, "llama", notes), notes)
    assert (made.do_sample, made.top_k, made.suppress_tokens) == (True, 20, [5, 7])
    assert [made.temperature, made.top_p, made.min_p, made.repetition_penalty] == pytest.approx([0.6, 0.95, 0.05, 1.1])
    assert notes == ["general.sampling.mirostat is not supported and left out"]
    made.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("sampling", "samples"),
    [({}, False), ({"temp": 0.0, "top_p": 0.9}, False), ({"top_p": 0.9}, True), ({"penalty_repeat": 1.1}, False)],
)
def test_samplers_are_used_if_there_is_anything_to_choose_by(
    sampling: dict[str, float], samples: bool, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    values = {f"general.sampling.{name}": value for name, value in sampling.items()}
    file = open_file(_write(tmp_path, {**_vocabulary(), **values}))
    made = generation_config_of(file, LlamaConfig(), GgufTokenizer(file.metadata, "llama", []), [])
    made.save_pretrained(tmp_path)
    assert bool(made.do_sample) is samples


def test_samplers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    file = open_file(_write(tmp_path, {**_vocabulary(), "general.sampling.temp": 1.0, "general.sampling.top_p": 7.0}))
    with pytest.raises(ModelError, match=r"has general\.sampling\.top_p = 7\.0 and a number from 1e-06 to 1"):
        generation_config_of(file, LlamaConfig(), GgufTokenizer(file.metadata, "llama", []), [])


def test_chat_templates_keep_their_names(tmp_path: Path) -> None:
    one = {**_vocabulary(), "tokenizer.chat_template": "one"}
    assert _built(tmp_path, one).chat_template == "one"
    several = {**one, "tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    assert _built(tmp_path, several).chat_template == {"default": "one", "tool_use": "tools"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "WordPiece": ({f"{KEY}model": "bert"}, "a tokenizer of the kind 'bert', and gpt2 and llama are read"),
    "none": ({f"{KEY}model": None}, "a tokenizer of the kind 'none'"),
    "no tokens": ({f"{KEY}tokens": None}, r"no tokenizer\.ggml\.tokens"),
    "types of others": ({f"{KEY}token_type": [1, 1]}, r"2 types \(tokenizer\.ggml\.token_type\) of 261 tokens"),
    "no merges": ({f"{KEY}merges": None}, r"no tokenizer\.ggml\.merges"),
    "merges of one": ({f"{KEY}merges": ["ab"]}, r"the merge 'ab' \(tokenizer\.ggml\.merges\)"),
    "merges of three": ({f"{KEY}merges": ["a b c"]}, "the merge 'a b c'"),
    "an end outside": ({f"{KEY}eos_token_id": 999}, r"eos_token_id = 999 and one of 261 tokens is expected"),
    "a turn outside": ({f"{KEY}eot_token_id": 999}, r"eot_token_id = 999"),
    "a text for a number": ({f"{KEY}eos_token_id": "</s>"}, r"eos_token_id = '</s>' and a whole number"),
    "a number for a flag": ({f"{KEY}add_bos_token": 1}, r"add_bos_token = 1 and true or false"),
    "a separator": ({f"{KEY}add_sep_token": True}, "add_sep_token"),
    "a list of templates": ({"tokenizer.chat_template": ["x"]}, r"chat_template = \['x'\] and a text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_by_name(case: str, tmp_path: Path) -> None:
    values, says = REFUSED[case]
    path = _write(tmp_path, {**_vocabulary(), f"{KEY}bos_token_id": 1, **values})
    with pytest.raises(ModelError, match=says) as raised:
        GgufTokenizer(open_file(path).metadata, "llama", []).build()
    assert "\n" not in str(raised.value) and "small.gguf" in str(raised.value)


def test_tokens_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has the token 'ab' twice"):
        _described(tmp_path, _vocabulary(("ab", 1)))
    pieces = _pieces()
    pieces[f"{KEY}scores"].pop()
    with pytest.raises(ModelError, match=r"267 scores \(tokenizer\.ggml\.scores\) of 268 tokens"):
        _described(tmp_path, pieces)[0].build()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_converted_models_tokenizer_is_the_files(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoTokenizer has a class for Qwen2, which makes another one of the same folder."""
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    values = {**_vocabulary((TURN, 3)), f"{KEY}pre": "smollm", f"{KEY}eos_token_id": 2, f"{KEY}eot_token_id": 261}
    options = {"attention_bias": False} if family == "llama" else {"use_sliding_window": False}
    model = make_model(family, tied=False, vocab_size=len(values[f"{KEY}tokens"]), **options)
    folder = open_model(str(of_any_model(model, family, values=values).write(tmp_path / "small.gguf")))
    tokenizer = load_tokenizer(folder)
    for text in ("e\u0301 12", f"hi{TURN}"):  # not composed
        assert tokenizer.encode(text) == _built(tmp_path, values)(text).input_ids
    assert json.loads((folder.path / "generation_config.json").read_text())["eos_token_id"] == [2, 261]
