"""Two folders are one model if nothing that a block computes differs, and else the difference can be named."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmnode.core.identity import explain_difference, is_variant
from llmnode.errors import ModelError
from llmnode.models.open_model import open_model
from llmnode.models.sources import identity
from llmnode.models.sources.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, shard_names
from reference.small import make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_model("llama", tied=False, seed=0).save_pretrained(tmp_path / "llama")
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
        f"{WEIGHTS}: trained further, or stored in another dtype, with another config.json",
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
    make_model("llama", tied=True, seed=0).save_pretrained(tmp_path / "tied")
    assert not is_variant(_digest(saved), _digest(tmp_path / "tied"))


def test_of_a_large_model_every_tensor_is_sampled(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the budget were so small. Training changes numbers everywhere."""
    monkeypatch.setattr(identity, "SAMPLED_BYTES", 4096)
    monkeypatch.setattr(identity, "WINDOW_BYTES", 64)
    sharded = shutil.copytree(saved, tmp_path / "sharded")
    _in_shards(sharded)
    assert _digest(sharded) == _digest(saved)
    for name in load_file(saved / SINGLE_FILE):
        other = shutil.copytree(saved, tmp_path / name)

        def changed(tensors: dict[str, torch.Tensor], name: str = name) -> None:
            tensors[name] += 1e-3

        _rewritten(other, changed)
        assert _digest(other) != _digest(saved), name


def test_a_large_model_costs_no_more_than_its_budget(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "SAMPLED_BYTES", 8192)
    monkeypatch.setattr(identity, "WINDOW_BYTES", 64)
    digested: list[int] = []
    digest = identity._native.blake3_digest
    monkeypatch.setattr(identity._native, "blake3_digest", lambda read: digested.append(len(read)) or digest(read))
    _digest(saved)
    assert 0 < sum(digested) <= 8192 < (saved / SINGLE_FILE).stat().st_size


def test_a_file_that_goes_away_meanwhile_is_told(saved: Path) -> None:
    folder = open_model(str(saved))
    (saved / SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match="cannot read"):
        identity.folder_weights(folder.files, {name: ("F32", [1]) for name in folder.files})
