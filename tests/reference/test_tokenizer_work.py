"""Descriptions of tokenizers that would take hours, or fill memory: each is refused before any text is encoded."""

from __future__ import annotations

import base64
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from llmnode.client.stopping import Limits, Stopping
from llmnode.errors import ModelError
from llmnode.models.embedded import open_embedded
from llmnode.models.sources.folder import ModelFolder, open_folder
from llmnode.models.text.regex_work import TEXT, RegexTooHard, work_of
from llmnode.models.text.tokenizer import TRUST, load_tokenizer
from llmnode.models.text.tokenizer import Tokenizer as OfModel
from llmnode.models.text.tokenizer_work import TooMuchWork, check_loaded, check_work
from reference.small import save_model
from reference.tokenizers_of_all_kinds import KINDS, UNSETTLED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference

GROWS = "times as long, and 16 is the most"
HOURS = "may take hours"
UNKNOWN = "llmnode does not know"
FOREVER = r"(a|a|aa)+$|(a+)+b"
N, P, D = normalizers, pre_tokenizers, decoders


def table(written: bytes) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + written).decode()


HOSTILE: dict[str, tuple[str, Any, str]] = {  # Any: a step of tokenizers, or its JSON
    "a letter by many": ("normalizer", N.Replace("a", "a" * 100), GROWS),
    "six times": ("normalizer", N.Sequence([N.Replace("a", "a" * 100) for _ in range(6)]), GROWS),
    "doubled in sequences of sequences": (
        "normalizer",
        N.Sequence([N.Sequence([N.Sequence([N.Replace("a", "aa")]), N.Replace("a", "aa")]) for _ in range(3)]),
        GROWS,
    ),
    "by a regex": ("normalizer", N.Sequence([N.Replace(Regex("[a-z]"), "aaa") for _ in range(3)]), GROWS),
    "nothing by a letter": ("normalizer", N.Sequence([N.Replace(Regex("a*"), "b") for _ in range(5)]), GROWS),
    "before the text": ("normalizer", N.Prepend("a" * 100), GROWS),
    "bytes of bytes": ("normalizer", N.Sequence([N.ByteLevel() for _ in range(5)]), GROWS),
    "a table of long words": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": table(b"a" * 2000)}, GROWS),
    "two tables": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": table(b"aa\0")}] * 2},
        "more than one table",
    ),
    "many steps": ("normalizer", N.Sequence([N.NFC() for _ in range(99)]), "99 steps in a row"),
    "a step twice": ("normalizer", '{"type":"Replace","pattern":{"String":"a"},"content":"a","content":""}', "twice"),
    "a step of nobody": ("normalizer", {"type": "Multiply"}, UNKNOWN),
    "a regex that never ends, normalizer": ("normalizer", N.Replace(Regex(FOREVER), "b"), HOURS),
    "a regex that never ends": ("pre_tokenizer", P.Split(Regex(FOREVER), "isolated"), HOURS),
    "a regex over words and spaces": ("pre_tokenizer", P.Split(Regex("(.*)b|[^x]*c"), "isolated"), HOURS),
    "a regex with the square": ("pre_tokenizer", P.Sequence([P.Split(Regex("a*a*b"), "removed")]), HOURS),
    "many regexes": ("pre_tokenizer", P.Sequence([P.Split(Regex("a*[bc]"), "removed") for _ in range(32)]), HOURS),
    "a regex that is not known": ("pre_tokenizer", P.Split(Regex(r"(?<n>a)\g<n>"), "isolated"), UNKNOWN),
    "spaces": ("pre_tokenizer", P.Sequence([P.Metaspace("xy"[at % 2]) for at in range(9)]), GROWS),
    "the text again and again": (
        "post_processor",
        processors.TemplateProcessing(["$A"] * 20, special_tokens=[]),
        GROWS,
    ),
    "the text twice, again": (
        "post_processor",
        processors.Sequence([processors.TemplateProcessing(["$A", "$A"], special_tokens=[]) for _ in range(5)]),
        GROWS,
    ),
    "many tokens": (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "a", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}},
        },
        "more than 64 tokens",
    ),
    "decoded to many": ("decoder", D.Sequence([D.Replace("a", "aaaa") for _ in range(6)]), GROWS),
    "decoded for ever": ("decoder", D.Sequence([D.Fuse(), D.Replace(Regex(FOREVER), "")]), HOURS),
    "spaces between letters": ("decoder", D.Sequence([D.BPEDecoder(suffix="") for _ in range(8)]), GROWS),
    "a long token": ("model", {"type": "WordLevel", "vocab": {"a" * 5000: 0}, "unk_token": "a"}, "more than 4096"),
    "a long prefix": (
        "model",
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "a" * 99},
        "continuing_subword_prefix of more than 64",
    ),
    "long words": (
        "model",
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 10**6},
        "max_input_chars_per_word",
    ),
    "steps that are none": ("decoder", {"type": "Replace", "content": 7, "pattern": {"String": "a"}}, "not as"),
}


def content(part: str, step: Any) -> str:
    """A tokenizer.json. One token is normalized, as the file is loaded: that alone may take hours."""
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    described = json.loads(made.to_str())
    token = {"id": 2, "content": "aaaaaaaac", "special": False, "single_word": False, "lstrip": False, "rstrip": False}
    described["added_tokens"] = [{**token, "normalized": True}]
    text = step if isinstance(step, str) else json.dumps(step if isinstance(step, dict) else state(step))
    return json.dumps({**described, part: "STEP"}).replace('"STEP"', text)


def state(step: Any) -> Any:
    return json.loads(step.__getstate__())


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    save_model(tmp_path, "llama", tied=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return open_folder(tmp_path, "acme/model")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_may_not_end_is_refused_as_it_is_loaded(folder: ModelFolder, name: str) -> None:
    part, step, says = HOSTILE[name]
    (folder.path / "tokenizer.json").write_text(content(part, step))
    with pytest.raises(ModelError, match="has no usable tokenizer: it ") as caught:
        load_tokenizer(folder)
    assert says in str(caught.value)
    assert f"set {TRUST}=1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_user_may_trust_a_tokenizer_that_is_refused(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    to_its_end = {"type": "Split", "pattern": {"Regex": "(.*)t$"}, "behavior": "Isolated", "invert": False}
    (folder.path / "tokenizer.json").write_text(content("pre_tokenizer", to_its_end))
    with pytest.raises(ModelError, match="goes back over words and spaces"):
        load_tokenizer(folder)
    monkeypatch.setenv(TRUST, "1")
    assert load_tokenizer(folder).encode("t")


@pytest.mark.parametrize("name", ["tokenizer.4.0.0.json", "tokenizer-tokenizer.4.0.0.json", "in/tokenizer.4.0.0.json"])
def test_a_file_that_transformers_takes_instead_is_refused_too(folder: ModelFolder, name: str) -> None:
    part, step, says = HOSTILE["six times"]
    (folder.path / "tokenizer.json").write_text(content("normalizer", N.NFC()))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "fast_tokenizer_files": [name]}
    (folder.path / "tokenizer_config.json").write_text(json.dumps(config))
    (folder.path / name).parent.mkdir(exist_ok=True)
    (folder.path / name).write_text(content(part, step))
    with pytest.raises(ModelError, match=says):
        load_tokenizer(folder)


def test_a_file_that_only_tokenizers_can_read_is_refused(folder: ModelFolder) -> None:
    part, step, _ = HOSTILE["six times"]
    truncation = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0, "x": "LONG"}
    described = {**json.loads(content(part, step)), "truncation": truncation}
    (folder.path / "tokenizer.json").write_text(json.dumps(described).replace('"LONG"', "1" * 5000))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
    (folder.path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load_tokenizer(folder)


def test_a_long_token_is_refused_wherever_it_is_written(folder: ModelFolder) -> None:
    token = {"content": "x" * 5000, "special": False, "single_word": False, "lstrip": False, "rstrip": False}
    described = json.loads(content("normalizer", N.NFC()))
    added = [*described["added_tokens"], {"id": 3, **token, "normalized": False}]
    (folder.path / "tokenizer.json").write_text(json.dumps({**described, "added_tokens": added}))
    with pytest.raises(ModelError, match="a token of more than 4096 characters"):
        load_tokenizer(folder)
    (folder.path / "tokenizer.json").write_text(json.dumps(described))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"3": token}}
    (folder.path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="a token of more than 4096 characters"):
        load_tokenizer(folder)


def test_a_tokenizer_made_of_other_files_is_refused_too() -> None:
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.normalizer = N.Sequence([N.Replace("a", "aa") for _ in range(20)])
    with pytest.raises(TooMuchWork, match=GROWS):
        check_loaded(PreTrainedTokenizerFast(tokenizer_object=made))


ONE_BY_ONE = P.Split(Regex("."), "isolated")
GROWING: dict[str, tuple[str, list[Any]]] = {  # Any: steps of tokenizers
    "bytes of bytes": ("normalizer", [N.ByteLevel()]),
    "bytes of words": ("pre_tokenizer", [ONE_BY_ONE, P.ByteLevel(add_prefix_space=True, use_regex=False)]),
    "spaces around characters": ("normalizer", [N.BertNormalizer()]),
    "spaces before words": ("pre_tokenizer", [ONE_BY_ONE, P.Metaspace("x", "always"), P.Metaspace("y", "always")]),
}
LONGEST = 16


@pytest.mark.parametrize("name", GROWING)
def test_steps_that_are_taken_make_no_text_longer_than_the_limit(name: str) -> None:
    part, steps = GROWING[name]
    kind, taken = N if part == "normalizer" else P, 0
    for times in range(1, 7):
        chain = kind.Sequence(steps * times)
        try:
            check_work({part: state(chain)})
        except TooMuchWork:
            continue
        taken += 1
        for text in ("\U0001f600", "\u4e2d", "a", "\u0130"):
            pieces = [chain.normalize_str(text)] if kind is N else [each for each, _ in chain.pre_tokenize_str(text)]
            assert sum(map(len, pieces)) <= LONGEST * len(text), (times, text)
    assert 0 < taken < 6


def test_json_that_is_too_deep_is_refused(folder: ModelFolder) -> None:
    (folder.path / "tokenizer.json").write_text(content("decoder", "[" * 100000 + "]" * 100000))
    with pytest.raises(ModelError, match="too many things in each other"):
        load_tokenizer(folder)


def test_tokenizers_of_all_kinds_are_taken() -> None:
    for tokenizer in (made() for name, made in KINDS.items() if name not in UNSETTLED):
        check_loaded(tokenizer)
        check_work(json.loads(tokenizer.backend_tokenizer.to_str()))


def test_the_embedded_models_tokenizer_is_taken() -> None:
    tokenizer = load_tokenizer(open_embedded())
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


PANICS: dict[str, tuple[Any, Callable[[OfModel], object]]] = {
    "encode": (("pre_tokenizer", P.Split(Regex(FOREVER), "isolated")), lambda made: made.encode("a" * 40 + "c")),
    "stop strings": (
        ("decoder", D.Strip("a", 0, 5)),
        lambda made: Stopping(Limits(9, False, (), ["b"], None), [0], made),
    ),
    "decode": (("decoder", D.Strip("a", 0, 5)), lambda made: made.decode([0])),
}


@pytest.mark.parametrize("name", PANICS)
def test_a_panic_of_tokenizers_is_a_model_error(name: str) -> None:
    (part, step), call = PANICS[name]
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "abcdef": 2}, unk_token="b"))
    setattr(made, part, step)
    tokenizer = OfModel(PreTrainedTokenizerFast(tokenizer_object=made), "acme/model")
    with pytest.raises(ModelError, match="the tokenizer of acme/model breaks down"):
        call(tokenizer)


def test_a_panic_as_the_file_is_loaded_is_a_model_error(folder: ModelFolder) -> None:
    """The token of `content` is normalized, and cut, as it is added."""
    (folder.path / "tokenizer.json").write_text(content("pre_tokenizer", {"type": "FixedLength", "length": 0}))
    with pytest.raises(ModelError):
        load_tokenizer(folder).encode("a")


@pytest.mark.parametrize("regex", sorted(set(GGUF_PRE_TOKENIZER_SPLITS.values())))
def test_the_regexes_that_transformers_knows_are_taken(regex: str) -> None:
    check_work({"pre_tokenizer": state(P.Split(Regex(regex), "isolated"))})


ATOMS = ("a", "b", "[ab]", "[^c]", r"\p{L}", r"\s", r"\b", "[a-z&&[^b]]", "$")
GROUPS = ("(", "(?:", "(?=", "(?!", "(?>", "(?i:")
OFTEN = ("", "", "?", "*", "+", "{1,3}", "{2}", "{2,}", "*?", "+?", "++")


def drawn(draw: random.Random, depth: int = 2) -> str:
    def part() -> str:
        if depth and draw.random() < 0.4:
            return f"{draw.choice(GROUPS)}{drawn(draw, depth - 1)})"
        return draw.choice(ATOMS)

    branches = ["".join(part() + draw.choice(OFTEN) for _ in range(draw.randint(1, 4))) for _ in range(3)]
    return "|".join(branches[: draw.randint(1, 3)])


def test_no_regex_that_is_taken_goes_back_ten_million_times() -> None:
    """tokenizers' engine panics then. Each regex is tried at one place, of texts whose square is more than that."""
    texts = ("a" * 5000, "ab" * 2500, "a" * 2500 + "b" * 2500, "a b " * 1250)
    taken = 0
    for seed in range(4000):
        regex = drawn(random.Random(seed))
        try:
            work = work_of(regex)
        except RegexTooHard:
            continue
        if work.ways > 32 * TEXT:
            continue
        taken += 1
        replace = N.Replace(Regex(rf"\A(?:{regex})"), "X" * max(1, work.shortest))
        for text in texts:
            length = len(replace.normalize_str(text))
            assert not work.shortest or length <= len(text), (seed, regex)
    assert taken > 100
