"""A GGUF file that is damaged, is something else, or lies about itself ends in one line, or changes nothing.

`LLMNODE_MUTATIONS` sets the number of drawn faults. The default takes seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llmnode.errors import ConfigError, ModelError
from llmnode.machine.cache_folder import cache_folder
from llmnode.models.open_model import open_model
from llmnode.models.sources.checkpoint import SINGLE_FILE
from llmnode.models.text.tokenizer import load_tokenizer
from reference.gguf_files import File, byte_tokens, of_model
from reference.small import make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.models.sources.folder import ModelFolder

pytestmark = pytest.mark.reference

DRAWS = int(os.environ.get("LLMNODE_MUTATIONS", "100"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model() -> File:
    return of_model(make_model("llama", tied=False, attention_bias=False), "llama")


@pytest.fixture(scope="module")
def sound(model: File, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without any fault. It must not be changed."""
    return model.write(tmp_path_factory.mktemp("sound") / "small.gguf")


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return shutil.copy(sound, tmp_path / "small.gguf")


def _refusal(path: Path) -> str:
    with pytest.raises((ModelError, ConfigError)) as raised:
        open_model(str(path))
    said = str(raised.value)
    assert "\n" not in said and path.name in said and len(said) < 600
    assert not list((cache_folder() / "models").glob("*/*"))
    return said


CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"cannot convert .*\(it is empty\): if it is damaged, get it again"),
    "other bytes": (b"not a model at all" * 100, r"\(it does not begin as a GGUF file does\): if it is damaged"),
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n",
        "git-lfs pointer .* `git lfs pull`",
    ),
    "a page": (
        b"\n<!DOCTYPE html>\n<html>Not found</html>",
        "is a web page and not the model: download the file itself",
    ),
    "the old format": (b"tjgg\x03\x00\x00\x00" + bytes(100), "a format before GGUF"),
    "an archive": (b"PK\x03\x04" + bytes(100), "is a zip archive: unpack it"),
    "four bytes": (b"GGUF", r"it is cut short: it has 4 bytes"),
    "version 1": (
        b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(20),
        "GGUF version 1, and versions 2 and 3 can be read",
    ),
    "version 9": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
    "nothing in it": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "its general.architecture is ''"),
    "huge counts": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), f"{2**63} keys of metadata"),
    "huge tables": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), f"{2**63} tensors"),
    "a huge key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), f"a text of {2**62} bytes"),
    "a huge list": (
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 2**60) + bytes(100),
        f"a list of {2**60} entries",
    ),
    "lists of lists": (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1) + bytes(100), "a list of lists"),
    "an unknown kind": (
        b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 77, 9),
        "a value of the type 77, which is not known",
    ),
    "a key of lines": (b"GGUF" + struct.pack("<IQQQ3sII", 3, 0, 1, 3, b"a\nb", 4, 9), r"a key of the name 'a\\nb'"),
    "a key that is no text": (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"\xff", 4, 9), "can't decode byte 0xff"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_what_is_no_gguf_file_is_told(case: str, tmp_path: Path) -> None:
    content, says = CONTENTS[case]
    path = tmp_path / "small.gguf"
    path.write_bytes(content)
    assert re.search(says, _refusal(path))


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a part": (
        {"split.count": 3, "split.no": 1},
        "is one of 3 parts of a model: merge them with `llama-gguf-split --merge",
    ),
    "an adapter": ({"general.type": "adapter"}, r"is an adapter \(LoRA\) and not a model"),
    "eyes": ({"general.type": "mmproj"}, r"sees or hears \(mmproj\): give the GGUF of its text model"),
    "old eyes": ({"general.architecture": "clip"}, r"sees or hears \(mmproj\)"),
    "a matrix": ({"general.type": "imatrix"}, "of the type 'imatrix' and not a model"),
}


@pytest.mark.parametrize("case", KINDS)
def test_what_is_no_whole_model_is_told(case: str, model: File, tmp_path: Path) -> None:
    values, says = KINDS[case]
    assert re.search(says, _refusal(File("llama", values, model.tensors).write(tmp_path / "small.gguf")))


def test_a_file_without_tensors_or_of_another_order_of_bytes_is_told(model: File, tmp_path: Path) -> None:
    assert "no tensors (vocab-only)" in _refusal(File("llama").write(tmp_path / "small.gguf"))
    big = File("llama", {}, model.tensors, endian=gguf.GGUFEndian.BIG)
    assert "is big-endian: convert it with `gguf-convert-endian`" in _refusal(big.write(tmp_path / "small.gguf"))


def test_a_file_cut_short_says_so_wherever_it_ends(copy: Path) -> None:
    content = copy.read_bytes()
    for length in (30, 100, 1000, 2000, len(content) // 2, len(content) - 100):
        copy.write_bytes(content[:length])
        assert f"it is cut short: it has {length} bytes" in _refusal(copy)


def _tensor_parts(path: Path, name: str) -> tuple[int, Any]:
    """The place of its entry in the table, and the parts of the entry."""
    field = next(tensor.field for tensor in gguf.GGUFReader(str(path)).tensors if tensor.name == name)
    return field.offset, field.parts


def _overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


TABLE: dict[str, tuple[int, bytes, str]] = {
    "an offset outside": (
        5,
        struct.pack("<Q", 2**40),
        r"the tensor 'output\.weight' is at 1099511627776 and should be at",
    ),
    "an offset inside": (5, struct.pack("<Q", 64), r"'output\.weight' is at 64 and should be at"),
    "a type": (4, struct.pack("<I", 99), r"'output\.weight' is of the type 99, which is not known"),
    "a shape": (3, struct.pack("<QQ", 2**40, 2**40), r"it is cut short: .* 'output\.weight' ends at"),
    "an empty shape": (3, struct.pack("<QQ", 0, 64), r"'output\.weight' is of the shape \[0, 64\]"),
    "rows of half a block": (4, struct.pack("<I", 12), r"has rows of 64, and Q4_K takes multiples of 256"),
    "dimensions": (2, struct.pack("<I", 7), r"of the shape|cut short|text of"),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_table_of_tensors_that_lies_is_told(case: str, copy: Path) -> None:
    part, content, says = TABLE[case]
    at, parts = _tensor_parts(copy, "output.weight")
    _overwrite(copy, at + sum(each.nbytes for each in parts[:part]), content)
    assert re.search(says, _refusal(copy))


def test_what_is_there_twice_is_told(copy: Path) -> None:
    at, _ = _tensor_parts(copy, "blk.1.attn_q.weight")
    _overwrite(copy, at + 8 + 4, b"0")
    assert "the tensor 'blk.0.attn_q.weight' twice" in _refusal(copy)
    _overwrite(copy, at + 8 + 4, b"1")
    fields = gguf.GGUFReader(str(copy)).fields
    _overwrite(copy, fields["tokenizer.ggml.bos_token_id"].offset + 8, b"tokenizer.ggml.eos_token_id")
    assert "the key 'tokenizer.ggml.eos_token_id' twice" in _refusal(copy)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.text(max_size=5).filter(lambda text: "\x00" not in text),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.lists(st.text(max_size=3), min_size=1, max_size=3),
)
"""Values for keys. None removes a key."""


def _keys() -> list[str]:
    return sorted(File("llama").metadata)


@st.composite
def faults(draw: st.DrawFn) -> tuple[str, Callable[[File, Path], Path]]:
    """The name of a fault, and a function that makes it in a sound file."""
    kind = draw(st.sampled_from(["cut", "number", "bytes", "insert", "value", "value", "value", "tensor"]))
    place, noise = draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(min_size=1, max_size=12))
    number = draw(st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
    key, value = draw(st.sampled_from(_keys())), draw(VALUES)

    def make(model: File, path: Path) -> Path:
        if kind == "value":
            return File("llama", {key: value}, model.tensors).write(path)
        if kind == "tensor":
            tensors = dict(model.tensors)
            names = sorted(tensors.keys() - {"output.weight"})  # without that one, the embedding is the head
            name = names[int(place * len(names))]
            del tensors[name]
            shape = [(3,), (64, 3), (2, 32, 64)][number % 3]
            if number > 1:
                tensors[name] = np.ones(shape, np.float32)
            return File("llama", {}, tensors).write(path)
        model.write(path)
        content = bytearray(path.read_bytes())
        header = gguf.GGUFReader(str(path)).tensors[-1].field.offset
        at = int(place * (len(content) if kind == "cut" else header))
        if kind == "cut":
            del content[at:]
        elif kind == "number":
            content[at : at + 8] = struct.pack("<Q", number)
        elif kind == "bytes":
            content[at : at + len(noise)] = noise
        else:
            content[at:at] = noise
        path.write_bytes(content)
        return path

    return f"{kind} at {place:.3f}: {number}, {noise!r}, {key} = {value!r}", make


def _opened(path: Path) -> ModelFolder | str:
    """The model, or the message of a proper refusal."""
    try:
        folder = open_model(str(path))
        load_tokenizer(folder).encode("hi")
    except (ModelError, ConfigError) as error:
        return str(error)
    return folder


@settings(settings.get_profile("reference"), max_examples=DRAWS)
@given(fault=faults())
def test_a_fault_is_refused_in_a_line_or_changes_no_tensor(
    fault: tuple[str, Callable[[File, Path], Path]], model: File, sound: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, make = fault
    folder = tmp_path_factory.mktemp("fault")
    opened = _opened(make(model, folder / "small.gguf"))
    if isinstance(opened, str):
        assert "\n" not in opened and len(opened) < 600
        assert str(folder) in opened or str(cache_folder()) in opened
    else:
        expected = load_file(open_model(str(sound)).path / SINGLE_FILE)
        found = load_file(opened.path / SINGLE_FILE)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    shutil.rmtree(folder)


def test_the_keys_that_are_drawn_are_those_that_models_have() -> None:
    assert set(byte_tokens()) < set(_keys()) and len(_keys()) == 15
