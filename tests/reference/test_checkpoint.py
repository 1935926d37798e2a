"""The files of a model in a folder are those that transformers takes. An error about them names the fix."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.models.load import load_ends, load_span
from llmnode.models.open_model import open_model
from llmnode.models.size import measure_size
from llmnode.models.sources.checkpoint import (
    ADAPTER_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    explain_lack,
    shard_names,
    weights_file,
)
from llmnode.models.sources.folder import read_config
from llmnode.models.text.tokenizer import load_tokenizer
from reference.folder_faults import PAGE, POINTER
from reference.small import cut, make_model, open_saved, save_model, session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference

OTHER, OTHER_INDEX = "sub/other.safetensors", "other.safetensors.index.json"
CANDIDATES = (SINGLE_FILE, INDEX_FILE, OTHER, OTHER_INDEX, "model.fp16.safetensors", "pytorch_model.bin")
NAMED = (None, SINGLE_FILE, OTHER, OTHER_INDEX, "../out.safetensors", "pytorch_model.bin", "")
SHARDS = {INDEX_FILE: {"a": "sub/2.safetensors", "b": "1.safetensors"}, OTHER_INDEX: {"a": "3.safetensors"}}


@pytest.mark.parametrize("named", NAMED)
def test_the_files_are_those_that_transformers_takes(named: str | None, tmp_path: Path) -> None:
    """This holds for every choice of candidates, and for any name in the config."""
    for number, present in enumerate(product((False, True), repeat=len(CANDIDATES))):
        folder = tmp_path / str(number)
        (folder / "sub").mkdir(parents=True)
        for name in (name for name, is_there in zip(CANDIDATES, present, strict=True) if is_there):
            (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": SHARDS.get(name, {})}))
        theirs, ours = _by_transformers(folder, named), _by_us(folder, named)
        if ours is not None:
            assert ours == theirs, (named, present)
        else:
            assert theirs in (None, ["pytorch_model.bin"]), (named, present)


@pytest.mark.parametrize("where", ["", "text_config"])
@pytest.mark.parametrize("count", [100_000, 1e9, float("inf")])
def test_a_config_of_more_layers_than_memory_can_list_is_refused_unread(
    count: float, where: str, tmp_path: Path
) -> None:
    """transformers makes a list of them."""
    counts = {"num_hidden_layers": count}
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_type": "qwen2", **({where: counts} if where else counts)}))
    with pytest.raises(ModelError, match="no model has as many"):
        read_config(tmp_path)


def _by_transformers(folder: Path, named: str | None) -> list[str] | None:
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    try:
        files, _ = _get_resolved_checkpoint_files(
            folder, None, None, None, None, is_remote_code=False, transformers_explicit_filename=named
        )
    except (OSError, ValueError):
        return None
    # A file that the config names need not exist: reading it fails later.
    there = files is not None and (len(files) > 1 or named == OTHER_INDEX or (folder / files[0]).is_file())
    return [file.removeprefix(f"{folder}/") for file in files] if there else None


def _by_us(folder: Path, named: str | None) -> list[str] | None:
    try:
        file = weights_file({"transformers_weights": named}, lambda name: (folder / name).is_file())
        shards = None if file is None else shard_names(folder, file)
    except ModelError:
        return None
    return (
        shards
        if shards is not None and (len(shards) > 1 or file == OTHER_INDEX or (folder / shards[0]).is_file())
        else None
    )


def test_what_is_left_over_changes_neither_digest_nor_sizes_nor_weights(tmp_path: Path) -> None:
    make_model("llama", tied=False, seed=1).save_pretrained(tmp_path / "model", max_shard_size="60KB")  # the older one
    save_model(tmp_path / "alone", "llama", tied=False)
    for file in (SINGLE_FILE, CONFIG_FILE):
        (tmp_path / "model" / file).write_bytes((tmp_path / "alone" / file).read_bytes())
    (tmp_path / "model" / "model.fp16.safetensors").write_bytes(b"not read")
    alone, beside = open_saved(tmp_path / "alone"), open_saved(tmp_path / "model")
    assert alone.digest == beside.digest
    assert measure_size(alone) == measure_size(beside)
    ours, expected = (cut(each, (0, 5)).forward({session(0): [3, 1, 4]})[session(0)] for each in (beside, alone))
    assert torch.equal(ours, expected)


LACKS = {
    "a variant": (
        ["config.json", "model.fp16.safetensors"],
        r"variant model\.fp16\.safetensors .* to model\.safetensors",
    ),
    "an index of one": (
        ["config.json", "model.safetensors.index.bf16.json", "model.bf16-00001-of-00001.safetensors"],
        r"rename it to model\.safetensors\.index\.json",
    ),
    "pickles": (["config.json", "pytorch_model.bin"], r"as pickles, .* \(pytorch_model\.bin\): .* save_pretrained"),
    "cut pickles": (["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "as pickles"),
    "gguf": (["small.Q4_0.gguf"], r"as GGUF: get one .*small\.Q4_0\.gguf, say"),
    "an adapter": (
        ["adapter_config.json", "adapter_model.safetensors"],
        "PEFT adapter of the model org/base, .* merge",
    ),
    "a checkpoint": (["config.json", "optimizer.pt", "checkpoint-5/config.json"], "its folder checkpoint-5 does"),
    "a folder": (["README.md", "main/config.json"], "its folder main does: give the path of that"),
    "Mistral's own": (
        ["config.json", "consolidated.safetensors", "params.json"],
        "but consolidated.safetensors: get the",
    ),
    "onnx": (["config.json", "model.onnx"], r"for other programs alone \(model\.onnx\): get the model in safetensors"),
    "flax": (["config.json", "flax_model.msgpack"], "other programs alone"),
    "a config": (["config.json"], "neither model.safetensors nor model.safetensors.index.json: get the whole model"),
    "nothing": ([], "has no config.json: get the whole model, or name its folder"),
}


@pytest.mark.parametrize("name", LACKS)
def test_a_folder_without_weights_for_us_says_what_it_has_and_what_to_do(name: str, tmp_path: Path) -> None:
    names, says = LACKS[name]
    make_model("gpt2", tied=True).config.save_pretrained(tmp_path / "config")
    for each in names:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text('{"base_model_name_or_path": "org/base"}')
    if CONFIG_FILE in names:
        (tmp_path / CONFIG_FILE).write_bytes((tmp_path / "config" / CONFIG_FILE).read_bytes())
    (tmp_path / "config" / CONFIG_FILE).unlink()
    with pytest.raises(ModelError, match=f"is not a model folder: it .*{says}") as raised:
        open_saved(tmp_path)
    assert "\n" not in str(raised.value)


def test_an_adapter_beside_its_model_is_not_left_out(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    (tmp_path / ADAPTER_FILE).write_text("{}")
    with pytest.raises(
        ModelError, match=r"beside the model, and llmnode runs none: merge it .* or move adapter_config"
    ):
        open_saved(tmp_path)


def test_a_distributed_checkpoint_is_not_left_out(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"a distributed checkpoint .*: load the model once with transformers and save"
    ):
        open_saved(tmp_path)


def _first(path: Path, names: str) -> Path:
    return sorted(path.glob(names))[0]


DAMAGE: dict[str, tuple[bytes | None, str]] = {
    "a pointer": (POINTER.encode(), r"is a pointer of git-lfs, .*: run `git lfs pull` in its folder"),
    "a web page": (PAGE.encode(), "is a web page: download it again"),
    "a page with a mark": (b"\xef\xbb\xbf\n<html>", "is a web page"),
    "an answer": (b"<?xml version='1.0'?><Error/>", "is an XML answer of some server"),
    "nothing": (b"", "is empty: download it again"),
    "a pickle": (b"PK\x03\x04abcdefgh", "is a zip file, perhaps a PyTorch pickle"),
    "gguf": (b"GGUF\x03\x00\x00\x00", "is a GGUF file under another name"),
    "gone": (None, "is missing: download it again"),
}


@pytest.mark.parametrize("file", [CONFIG_FILE, INDEX_FILE, "model-00002*", SINGLE_FILE])
@pytest.mark.parametrize("name", DAMAGE)
def test_what_stands_in_the_place_of_a_file_is_told(name: str, file: str, tmp_path: Path) -> None:
    make_model("gpt2", tied=True).save_pretrained(tmp_path, max_shard_size="1GB" if file == SINGLE_FILE else "60KB")
    damaged, (content, says) = _first(tmp_path, file), DAMAGE[name]
    if content is None:
        damaged.unlink()
        if not file.startswith("model-"):
            return  # then another file is the model, or none is
    else:
        damaged.write_bytes(content)
    with pytest.raises(ModelError, match=rf"is not a model folder: {damaged.name} {says}") as raised:
        open_saved(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda whole: whole[: len(whole) // 2], r"is cut off, with \d+ of at least \d+ bytes: download it again"),
        (lambda whole: whole[:20], "is cut off"),
        (lambda whole: whole[:5], "is not of safetensors, or damaged"),
        (lambda whole: whole + b"x", r"has \d+ bytes where its header says \d+: download it again"),
        (lambda whole: b"\xff" * 8 + whole[8:], "is not of safetensors, or damaged"),
        (lambda whole: whole[:8] + b"[" + whole[9:], "is not of safetensors, or damaged"),
    ],
)
def test_a_file_of_another_length_than_its_header_says_is_told(
    change: Callable[[bytes], bytes], says: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "gpt2", tied=True)
    (tmp_path / SINGLE_FILE).write_bytes(change((tmp_path / SINGLE_FILE).read_bytes()))
    with pytest.raises(ModelError, match=f"model.safetensors {says}"):
        open_saved(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'\xef\xbb\xbf{"model_type": "gpt2"}', "begins with a byte order mark, .* save it as UTF-8 without one"),
        ('{"model_type": "gpt2"}'.encode("utf-16"), "is of UTF-16: save it as UTF-8"),
        (b'{"model_type": "\xff"}', r"is no JSON \(.*\): download it again"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "holds a list where an object must be"),
        (b"null", "holds a NoneType where"),
        (b'{"model_type": "new9"}', "'new9' are not supported; supported are: bloom, cohere"),
        (b'{"model_type": ["gpt2"]}', "transformers takes no such config.json"),
        (b"{}", "transformers takes no such config.json .*model_type"),
        (b'{"model_type": "llama", "num_attention_heads": 0}', "not a model folder|makes no model of"),
    ],
)
def test_a_config_that_is_not_known_is_refused_in_a_line(content: bytes, says: str, tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2", tied=True)
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=says) as raised:
        load_span(open_saved(tmp_path), Span(0, 1), "sdpa")
    assert "\n" not in str(raised.value)


def test_a_link_to_what_is_gone_is_told(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2", tied=True)
    (tmp_path / CONFIG_FILE).unlink()
    (tmp_path / CONFIG_FILE).symlink_to("../blobs/c0ffee")
    with pytest.raises(ModelError, match=r"config\.json is a link to a file that is gone \(\.\./blobs/c0ffee\)"):
        open_saved(tmp_path)


def test_what_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    save_model(tmp_path, "gpt2", tied=True)
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.read_bytes", refuse)
        with pytest.raises(ModelError, match=r"config\.json cannot be read: Permission denied"):
            open_saved(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refuse)
        with pytest.raises(ModelError, match=f"{tmp_path} cannot be read: Permission denied"):
            open_saved(tmp_path)
    monkeypatch.setattr("pathlib.Path.resolve", refuse)
    with pytest.raises(ConfigError, match=rf"{tmp_path}: cannot be read \(Permission denied"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "a\0b", "x" * 5000])
def test_what_no_path_can_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither|give the path of a file or folder"):
        open_model(name)


@pytest.mark.parametrize("place", ["mit Leerzeichen", "ü/模型", "~/model"])
def test_a_path_may_have_any_letters(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_model("gpt2", tied=True).save_pretrained(tmp_path / place.removeprefix("~/"))
    given = place if place.startswith("~") else str(tmp_path / place)
    assert open_model(given).name == place.rpartition("/")[2]


def test_a_tokenizer_that_is_not_the_file_itself_is_told(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2", tied=True)
    for content, says in ((POINTER, "git lfs pull"), (PAGE, "is a web page"), ("", "is empty")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=rf"tokenizer\.json .*{says}"):
            load_tokenizer(open_saved(tmp_path))


def _sharded(path: Path) -> Path:
    make_model("llama", tied=False).save_pretrained(path, max_shard_size="60KB")
    return path


def _weight_map(path: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    return weight_map


def _refused(path: Path) -> str:
    """The reason why one of its parts is refused."""
    folder = open_saved(path)
    with pytest.raises(ModelError) as raised:  # noqa: PT012 - one or the other
        load_ends(folder)
        load_span(folder, Span(0, 5), "sdpa")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_shard_that_is_another_is_named(tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    shard, first = _weight_map(path)["model.layers.3.mlp.up_proj.weight"], _first(path, "model-00001*")
    (path / shard).write_bytes(first.read_bytes())
    assert f"{shard} lacks model.layers.3.mlp.up_proj.weight, which {INDEX_FILE} says it has" in _refused(path)
    load_span(open_saved(path), Span(0, 3), "sdpa")


def test_a_file_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    index = json.loads((path / INDEX_FILE).read_text())
    shard = index["weight_map"]["model.layers.3.mlp.up_proj.weight"]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != shard}
    (path / INDEX_FILE).write_text(json.dumps(index))
    assert f"{shard} has some, but {INDEX_FILE} does not list it" in _refused(path)


def test_files_that_exchanged_their_names_are_read_all_the_same(tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    first, second = sorted(path.glob("model-*"))[:2]
    before = load_ends(open_saved(path)).logits(torch.ones(1, 64))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert torch.equal(load_ends(open_saved(path)).logits(torch.ones(1, 64)), before)


def test_a_model_without_its_head_is_told(tmp_path: Path) -> None:
    make_model("llama", tied=False).model.save_pretrained(tmp_path)
    assert "no tensors for lm_head.weight: the model was saved without its head, as a base model" in _refused(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_weights_that_are_no_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    tensors: dict[str, torch.Tensor] = dict(load_file(tmp_path / SINGLE_FILE))
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / SINGLE_FILE, {"format": "pt"})
    assert f"holds {name} as " in (refusal := _refused(tmp_path))
    assert "and config.json has no quantization: get the model in one of F64, F32, F16, BF16" in refusal
    load_span(open_saved(tmp_path), Span(2, 5), "sdpa")


def test_more_blocks_than_tensors_are_not_made(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    _change(tmp_path, num_hidden_layers=10**4)
    assert "tells of 10000 blocks, and all files together have" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("case", "change"),
    [("mixtral", {"num_experts_per_tok": 99}), ("llama", {"num_key_value_heads": 3, "head_dim": 64 // 4})],
)
def test_sizes_that_do_not_fit_each_other_are_told_when_blocks_are_loaded(
    case: str, change: dict[str, Any], tmp_path: Path
) -> None:
    save_model(tmp_path, case, tied=False)
    _change(tmp_path, **change)
    if case == "llama":
        with safe_open(tmp_path / SINGLE_FILE, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        for name in [each for each in tensors if "k_proj" in each or "v_proj" in each]:
            tensors[name] = torch.cat([tensors[name], tensors[name]])[:48].contiguous()
        save_file(tensors, tmp_path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=r"config\.json describes cannot compute \(.*\): get it again"):
        cut(open_saved(tmp_path), (0, 5))


def _change(path: Path, **change: Any) -> None:
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps({**config, **change}))


def test_names_alone_are_enough_to_tell() -> None:
    assert explain_lack(["x.gguf", "config.json"], lambda: None).startswith("holds its weights as GGUF")
