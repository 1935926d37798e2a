"""Two folders are one model if nothing that a block computes differs, and else the difference can be named."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmnode.core.identity import explain_difference, is_variant
from llmnode.errors import ModelError
from llmnode.models.open_model import open_model
from llmnode.models.sources import file_digests, identity
from llmnode.models.sources.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, shard_names
from reference.small import make_model, save_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tmp_path / "llama", "llama", tied=False, seed=0)
    return tmp_path / "llama"


def _digest(path: Path) -> bytes:
    return open_model(str(path)).digest


def _edited(path: Path, **changes: Any) -> None:
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps({**config, **changes}, indent=3))


def _rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})


def _in_shards(path: Path) -> None:
    config = (path / CONFIG_FILE).read_text()
    (path / SINGLE_FILE).unlink()
    make_model("llama", tied=False, seed=0).save_pretrained(path, max_shard_size="60KB")
    (path / CONFIG_FILE).write_text(config)
    assert len(shard_names(path, INDEX_FILE)) > 1


SAME: dict[str, Callable[[Path], None]] = {
    "as it is": lambda _path: None,
    "where it came from": lambda path: _edited(path, _name_or_path="downloads/llama"),
    "by another version": lambda path: _edited(path, transformers_version="9.9", torch_dtype="bfloat16"),
    "another end of a turn": lambda path: _edited(path, eos_token_id=[2, 7], use_cache=False),
    "whole numbers": lambda path: _edited(path, rope_theta=10000, attention_dropout=0.1),
    "other files beside": lambda path: (path / "README.md").write_text("hi") and None,
    "in shards": _in_shards,
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_a_copy_is_the_same_model_whatever_its_folder_is_called(
    change: Callable[[Path], None], saved: Path, tmp_path: Path
) -> None:
    _edited(saved, rope_theta=10000.0)
    copy = shutil.copytree(saved, tmp_path / "elsewhere" / "my-llama")
    change(copy)
    assert _digest(copy) == _digest(saved)


def _trained_further(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3


def _one_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.self_attn.o_proj.weight"][3, 5] += 1


def _rounded(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})


def _swapped(tensors: dict[str, torch.Tensor]) -> None:
    """Two tensors of one shape."""
    names = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    tensors.update(zip(names, [tensors[name].clone() for name in reversed(names)], strict=True))


WEIGHTS = "of the same shape as ours and with other numbers"
OTHER: dict[str, tuple[Callable[[Path], None], str]] = {
    "trained further": (lambda path: _rewritten(path, _trained_further), WEIGHTS),
    "a number": (lambda path: _rewritten(path, _one_number), WEIGHTS),
    "rounded": (lambda path: _rewritten(path, _rounded), WEIGHTS),
    "swapped": (lambda path: _rewritten(path, _swapped), WEIGHTS),
    "another config": (lambda path: _edited(path, rms_norm_eps=1e-3), "of the same weights, with another config.json"),
    "both": (
        lambda path: [_rewritten(path, _rounded), _edited(path, rope_theta=5e5)].clear(),
        f"{WEIGHTS}: trained further, stored in another dtype, or identified by an older llmnode, with another config",
    ),
}


@pytest.mark.parametrize(("change", "words"), OTHER.values(), ids=OTHER.keys())
def test_other_weights_in_a_folder_of_the_same_name_are_another_model_and_the_difference_is_named(
    change: Callable[[Path], None], words: str, saved: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(saved, tmp_path / "elsewhere" / "llama")
    change(other)
    ours, theirs = _digest(saved), _digest(other)
    assert ours != theirs and is_variant(ours, theirs)
    text, fix = explain_difference(ours, theirs, "llama")
    assert text.startswith(words) and fix


def test_another_layout_is_no_variant(saved: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "tied", "llama", tied=True, seed=0)
    assert not is_variant(_digest(saved), _digest(tmp_path / "tied"))


def test_a_tensor_of_several_chunks_counts_whole(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are small here."""
    whole = _digest(saved)
    monkeypatch.setattr(identity, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(file_digests, "_read", lambda _kept, _stamp: None)
    sharded = shutil.copytree(saved, tmp_path / "sharded")
    _in_shards(sharded)
    assert _digest(sharded) == _digest(saved) != whole
    name, tensor = max(load_file(saved / SINGLE_FILE).items(), key=lambda item: item[1].nbytes)
    assert tensor.nbytes > 10 * 1000
    for place in range(0, tensor.numel(), 250):

        def changed(tensors: dict[str, torch.Tensor], place: int = place) -> None:
            tensors[name].view(-1)[place] += 1

        other = shutil.copytree(saved, tmp_path / f"{place}")
        _rewritten(other, changed)
        assert _digest(other) != _digest(saved), place


class Reads:
    """The files of which digests are computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        compute = identity.tensor_digests

        def counted(file: Path) -> dict[str, str]:
            self.files.append(file.name)
            return compute(file)

        monkeypatch.setattr(identity, "tensor_digests", counted)


def _settle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files look old."""
    monkeypatch.setattr(file_digests, "SETTLED_S", -1.0)
    assert path.is_dir()


def test_a_file_is_read_once_for_its_digests(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    first = _digest(saved)
    assert _digest(saved) == first
    assert reads.files == [SINGLE_FILE] * 2, "it was written a moment ago: it may change within its time"
    _settle(saved, monkeypatch)
    assert {_digest(saved) for _ in range(3)} == {first}
    assert reads.files == [SINGLE_FILE] * 3


def _written_again(path: Path) -> None:
    _rewritten(path, _one_number)


def _replaced_with_its_time(path: Path) -> None:
    before = (path / SINGLE_FILE).stat()
    tensors = load_file(path / SINGLE_FILE)
    _one_number(tensors)
    save_file(tensors, path / "new", metadata={"format": "pt"})
    os.utime(path / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (path / "new").replace(path / SINGLE_FILE)
    after = (path / SINGLE_FILE).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def _written_in_place_with_its_time(path: Path) -> None:
    before = (path / SINGLE_FILE).stat()
    with (path / SINGLE_FILE).open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))
    os.utime(path / SINGLE_FILE, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (path / SINGLE_FILE).stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


CHANGES = [_written_again, _replaced_with_its_time, _written_in_place_with_its_time]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_changed_is_another_model_whatever_time_it_claims(
    change: Callable[[Path], None], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settle(saved, monkeypatch)
    before = _digest(saved)
    change(saved)
    assert _digest(saved) != before


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_is_saved_into_after_it_was_opened_is_not_served(
    change: Callable[[Path], None], saved: Path
) -> None:
    folder = open_model(str(saved))
    name = "model.layers.2.self_attn.o_proj.weight"
    assert folder.read({name: torch.float32})
    change(saved)
    with pytest.raises(ModelError, match="has been written since this model was opened"):
        folder.read({name: torch.float32})


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"stamp": 1, "digests": {}}', '{"stamp": [1], "digests": 3}']
)
def test_kept_digests_that_cannot_be_read_are_computed_again(
    content: str, saved: Path, blueprints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settle(saved, monkeypatch)
    expected = _digest(saved)
    kept = max((blueprints / "digests").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    kept.write_text(content)
    assert _digest(saved) == expected
    assert json.loads(kept.read_text())["digests"]


def test_without_a_place_to_keep_them_digests_are_computed_each_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settle(saved, monkeypatch)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(file_digests, "cache_folder", (tmp_path / "file").joinpath)
    reads = Reads(monkeypatch)
    assert _digest(saved) == _digest(saved)
    assert len(reads.files) == 2


def test_a_file_that_goes_away_meanwhile_is_told(saved: Path) -> None:
    folder = open_model(str(saved))
    (saved / SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match="cannot read"):
        identity.folder_weights(folder.files, {name: ("F32", [1]) for name in folder.files})
