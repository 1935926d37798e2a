"""A model's tokenizer as its folder has it: files that are damaged or missing, tokens of no model, ends of answers."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from llmnode.client.sampling import Sampling
from llmnode.errors import ConfigError, ModelError
from llmnode.models.generation_config import generation_config
from llmnode.models.load import load_ends
from llmnode.models.sources.folder import open_folder
from llmnode.models.text.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from llmnode.models.text.vocabulary import check_tokens
from reference.small import save_model
from reference.tokenizers_of_all_kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 17\n"
LFS = "is a pointer of git-lfs"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_model(folder, "llama", tied=False)
    KINDS["Llama 2"]().save_pretrained(folder)
    return folder


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return shutil.copytree(whole, tmp_path / "model")


def edited(path: Path, **changes: object) -> None:
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))


def as_sentencepiece(path: Path, content: bytes) -> None:
    (path / "tokenizer.json").unlink()
    edited(path, tokenizer_class="LlamaTokenizer")
    (path / "tokenizer.model").write_bytes(content)


def with_mark(path: Path) -> None:
    content = (path / "tokenizer_config.json").read_bytes()
    (path / "tokenizer_config.json").write_bytes(b"\xef\xbb\xbf" + content)


def without_files(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    edited(path, tokenizer_class="T5Tokenizer")  # of which transformers makes an empty one


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda path: (path / "tokenizer.json").unlink(), "it has no tokenizer.json: put"),
    "no file that its class wants": (without_files, "it has no tokenizer.json: put"),
    "a pointer": (lambda path: (path / "tokenizer.json").write_text(POINTER), f"tokenizer.json {LFS}"),
    "a config's pointer": (
        lambda path: (path / "tokenizer_config.json").write_text(POINTER),
        f"tokenizer_config.json {LFS}",
    ),
    "a pointer of SentencePiece": (lambda path: as_sentencepiece(path, POINTER.encode()), f"tokenizer.model {LFS}"),
    "SentencePiece alone": (
        lambda path: as_sentencepiece(path, b"\x0a\x05abc"),
        "tokenizer.model alone needs a library",
    ),
    "cut off": (
        lambda path: (path / "tokenizer.json").write_text('{"version": '),
        "tokenizer.json is no JSON (Expecting",
    ),
    "empty": (lambda path: (path / "tokenizer.json").write_text(""), "tokenizer.json is empty"),
    "another JSON": (lambda path: (path / "tokenizer.json").write_text("[1]"), "tokenizer.json holds a list"),
    "JSON of something else": (
        lambda path: (path / "tokenizer.json").write_text('{"a": 1}'),
        "KeyError: 'added_tokens'",
    ),
    "a byte order mark": (with_mark, "tokenizer_config.json begins with a byte order mark, which"),
    "another file": (
        lambda path: (path / "special_tokens_map.json").write_text("null"),
        "special_tokens_map.json holds a NoneType",
    ),
    "code": (
        lambda path: edited(path, tokenizer_class="X", auto_map={"AutoTokenizer": ["x.X", None]}),
        "it is code of the model's own, which is never run here",
    ),
    "a null": (lambda path: edited(path, added_tokens_decoder=None), "(AttributeError: 'NoneType' "),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_wrong_with_a_tokenizer_is_said_in_a_line_and_only_to_who_uses_it(
    path: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(path)
    folder = open_folder(path, "small")
    with pytest.raises(ModelError) as failed:
        load_tokenizer(folder)
    assert f"{path} has no usable tokenizer: " in str(failed.value) and said in str(failed.value)
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 600 + len(str(path))
    tokenizer = find_tokenizer(folder)
    assert tokenizer.token(5) is None
    for use in (lambda: tokenizer.encode("hi"), lambda: tokenizer.decode([5]), lambda: tokenizer.encode_dialogue([])):
        with pytest.raises(ModelError, match="no usable tokenizer"):
            use()


@pytest.mark.parametrize("nothing", ["eos_token", "bos_token", "pad_token", "chat_template", "model_max_length"])
def test_what_a_tokenizer_config_leaves_open_is_null(path: Path, nothing: str) -> None:
    edited(path, **{nothing: None})
    tokenizer = load_tokenizer(open_folder(path, "small"))
    assert tokenizer.decode(tokenizer.encode("Once upon a")) == "Once upon a"


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
def test_a_token_that_the_embedding_does_not_have_is_named(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    ends = load_ends(open_folder(tmp_path, "small"))
    size = ends.embedding.config.vocab_size  # type: ignore[union-attr]  # of transformers
    assert ends.vocabulary == size
    assert ends.embed([0, size - 1], 0).shape[0] == 2
    for outside in (-1, size, 1 << 40):
        with pytest.raises(ConfigError, match=f"token {outside} is not one of the model's {size}: give ids from 0 to"):
            ends.embed([0, outside], 0)
    with pytest.raises(ConfigError, match=rf"token {size}, '\[PAD\]', is not one of the model's {size}: its tokenizer"):
        check_tokens([1, size], size, {size: "[PAD]"}.get)


@pytest.mark.parametrize("kind", ["Llama 2", "byte-level BPE", "T5", "BERT"])
def test_ids_that_the_tokenizer_does_not_know_say_nothing(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind](), kind)
    known = [len(tokenizer._loaded) - 1]
    assert tokenizer.decode([*known, 1 << 20, *known]) == tokenizer.decode(known * 2)
    assert tokenizer.token(1 << 40) is tokenizer.token(-1) is None


@pytest.mark.parametrize(
    ("config", "generation", "stop"),
    [
        (2, {"eos_token_id": 5}, {5}),
        (2, {"eos_token_id": [5, 6]}, {5, 6}),
        (2, {}, set()),
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (None, None, set()),
        ("left out", None, set()),  # although the family's own default is 2
    ],
)
def test_what_ends_an_answer_is_what_transformers_takes(
    path: Path, config: object, generation: dict[str, object] | None, stop: set[int]
) -> None:
    from transformers import AutoModelForCausalLM

    said = json.loads((path / "config.json").read_text())
    said.pop("eos_token_id", None)
    (path / "config.json").write_text(json.dumps(said if config == "left out" else {**said, "eos_token_id": config}))
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    folder = open_folder(path, "small")
    theirs = AutoModelForCausalLM.from_pretrained(path).generation_config
    assert generation_config(folder).to_dict() == theirs.to_dict()
    assert Sampling().of(generation_config(folder)).end_tokens == stop
