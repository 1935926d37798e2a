"""A part finds its tensors however the folder names, cuts and stores them. A folder that we cannot read is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from llmnode.core.model import Precision
from llmnode.core.span import Span
from llmnode.errors import ModelError
from llmnode.models.families import FAMILIES, Family
from llmnode.models.layers import join_products
from llmnode.models.load import load_ends, load_span
from llmnode.models.sources import folder as folder_module
from llmnode.models.sources.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from reference.small import (
    BLOCKS,
    HIDDEN_SIZE,
    VOCABULARY,
    cut,
    deviation,
    family_of_case,
    make_model,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference

RENAMED = ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt2", "gpt_neox", "opt", "phi3", "bloom", "falcon"]
"""Families whose files have, or once had, other names for tensors than the model."""


def _as_transformers_saves(model: Any, path: Path) -> None:
    model.save_pretrained(path)


def _as_the_model_names_them(model: Any, path: Path) -> None:
    model.config.save_pretrained(path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    tensors[f"{FAMILIES[model.config.model_type].block_prefix}2.attn.bias"] = torch.ones(3)  # old files of gpt2 have it
    save_file(tensors, path / SINGLE_FILE)


def _without_the_prefix(model: Any, path: Path) -> None:
    """gpt2 and some of opt are on the hub in this form: saved from the base model."""
    model.base_model.save_pretrained(path)
    model.config.save_pretrained(path)
    if not model.config.tie_word_embeddings:
        with safe_open(path / SINGLE_FILE, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        save_file({**tensors, "lm_head.weight": model.lm_head.weight}, path / SINGLE_FILE)


def _sharded(model: Any, path: Path) -> None:
    model.save_pretrained(path, max_shard_size="60KB")
    assert (path / INDEX_FILE).exists() and len(list(path.glob("*.safetensors"))) > BLOCKS


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("save", [_as_transformers_saves, _as_the_model_names_them, _without_the_prefix, _sharded])
@pytest.mark.parametrize("case", ["llama", *RENAMED])
def test_tensors_are_found_however_they_are_stored(
    case: str, save: Callable[[Any, Path], None], tied: bool, tmp_path: Path
) -> None:
    model = make_model(case, tied=tied)
    save(model, tmp_path)
    folder = open_saved(tmp_path)
    family = FAMILIES[family_of_case(case)]
    expected = _as_loaded(model, family)

    span = load_span(folder, Span(2, 4), "sdpa")
    for name, tensor in span.blocks.state_dict().items():
        block, rest = name.split(".", 1)
        assert torch.equal(tensor, expected[f"{family.block_prefix}{int(block) + 2}.{rest}"]), name

    ends = load_ends(folder)
    prefix = f"{family.decoder}."
    held = {f"{prefix}{name}": tensor for name, tensor in ends.embedding.state_dict().items()}
    held |= ends.scoring.state_dict()
    assert held.keys() == {name for name in expected if not name.startswith(family.block_prefix)}
    for name, tensor in held.items():
        assert torch.equal(tensor, expected[name]), name
    assert (ends.scoring.lm_head.weight is ends.embedding.get_submodule(family.tokens).weight) == tied


def _as_loaded(model: Any, family: Family) -> dict[str, torch.Tensor]:
    """Its tensors as a span has them, with some of them joined."""
    if family.fused:
        for block in getattr(model.get_submodule(family.decoder), family.blocks):
            join_products(block)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def test_of_a_file_that_is_read_little_stays_in_memory_beside_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tied=True)
    model.save_pretrained(tmp_path)
    largest = max(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(folder_module, "_MAPPED_BYTES", largest)
    mapped: list[int] = []

    class Watched:
        """Stands in for safetensors' own class, and notes what is mapped."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._opened = safe_open(*arguments, **options)

        def __enter__(self) -> Watched:
            mapped.append(0)
            return self

        def __exit__(self, *_exc_info: object) -> None:
            self._opened.__exit__(None, None, None)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor: torch.Tensor = self._opened.get_tensor(name)
            mapped[-1] += tensor.nbytes
            return tensor

    folder, expected = open_saved(tmp_path), _as_loaded(model, FAMILIES["llama"])
    monkeypatch.setattr(folder_module, "safe_open", Watched)
    for name, tensor in load_span(folder, Span(0, BLOCKS), "sdpa").blocks.state_dict().items():
        assert torch.equal(tensor, expected[f"model.layers.{name}"]), name
    assert len(mapped) > 2
    assert max(mapped) < 2 * largest


def test_the_classic_layout_of_mixtral_is_what_transformers_saves(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral", tied=False)
    stored = open_saved(tmp_path).files.keys()
    assert {f"model.layers.0.block_sparse_moe.experts.3.w{part}.weight" for part in (1, 2, 3)} <= stored
    assert "model.layers.0.block_sparse_moe.gate.weight" in stored


def test_a_span_opens_no_shard_but_those_of_its_blocks(tmp_path: Path) -> None:
    _sharded(make_model("llama", tied=False), tmp_path)
    folder = open_saved(tmp_path)
    needed = {file for name, file in folder.files.items() if name.startswith("model.layers.3.")}
    others = set(folder.files.values()) - needed
    assert others
    for file in others:
        file.unlink()
    load_span(folder, Span(3, 4), "sdpa")
    with pytest.raises(ModelError, match="cannot read"):
        load_span(folder, Span(0, 1), "sdpa")


@pytest.mark.parametrize(
    "missing", ["model.layers.1.mlp.experts.4.up_proj.weight", "model.layers.1.input_layernorm.weight"]
)
def test_an_incomplete_folder_is_refused(missing: str, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_moe", tied=False)
    with safe_open(tmp_path / SINGLE_FILE, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != missing}  # noqa: SIM118
        assert len(tensors) == len(opened.keys()) - 1
    save_file(tensors, tmp_path / SINGLE_FILE)
    folder = open_saved(tmp_path)
    load_span(folder, Span(2, 3), "sdpa")
    with pytest.raises(ModelError, match=r"model\.layers\.1"):
        load_span(folder, Span(0, 2), "sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as fp32", "as bf16"])
@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "mixtral"])
@torch.inference_mode()
def test_half_precision_on_disk_is_computed_in_the_dtype_asked_for(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    make_model(case, tied=True).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    ids = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(4))
    folder = open_saved(tmp_path)
    assert folder.info.precision == Precision()
    ours = cut(folder, (0, 2, BLOCKS), dtype)
    hidden = ours.forward({session(0): ids[0].tolist()})[session(0)]
    assert hidden.dtype is torch.float32 and hidden.shape == (20, HIDDEN_SIZE)
    expected = model(ids).logits[0].float()
    # In bf16 chunks often make no difference at all. One unit in the last place must still be allowed.
    epsilon = max(4 * deviation(model, ids), torch.finfo(dtype).eps * expected.abs().max().item())
    assert (ours.ends.logits(hidden) - expected).abs().max() < epsilon


@pytest.mark.parametrize("case", ["gpt2", "opt-projected", "gemma3_text"])
def test_info_knows_the_size_by_whatever_name(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    info = open_saved(tmp_path).info
    assert (info.blocks, info.hidden_size, info.context_tokens) == (BLOCKS, HIDDEN_SIZE, 128)


def test_what_bloom_was_made_for_is_known_though_its_configs_do_not_say(tmp_path: Path) -> None:
    save_model(tmp_path, "bloom", tied=True)
    assert open_saved(tmp_path).info.context_tokens == 2048


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by gptq"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
        ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized by awq"),
        ("llama", {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "by bitsandbytes"),
        ("llama", {"quantization_config": {}}, "by a method that it does not name"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ("llama", {"sliding_window": "x"}, "a sliding_window of 'x' positions"),
        ("llama", {"layer_types": ["sliding_attention"] * 5}, "layer_types, of which its attention knows nothing"),
        ("mixtral", {"sliding_window": 0}, "a sliding_window of 0 positions"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "embeddings of the type 'spiral'"),
        ("llama", {"model_type": "mpt"}, "supported are: bloom, cohere"),
        ("llama", {"model_type": "t5"}, "supported are: bloom, cohere"),
        (
            "llama",
            {"model_type": "new9", "auto_map": {"AutoConfig": "a.B"}},
            r"'new9', needs code of its own \(auto_map",
        ),
        ("llama", {"configuration_files": ["config.4.0.0.json"]}, "names other config files"),
    ],
)
def test_what_we_cannot_do_right_is_refused(case: str, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    _change_config(tmp_path, **change)
    with pytest.raises(ModelError, match=reason) as raised:
        open_saved(tmp_path)
    assert "\n" not in str(raised.value)


def _change_config(path: Path, **change: Any) -> None:
    """A field that becomes None is left out."""
    config = json.loads((path / CONFIG_FILE).read_text())
    config = {name: value for name, value in {**config, **change}.items() if value is not None}
    (path / CONFIG_FILE).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"x": "../other/model.safetensors"}, r"'\.\./other/model\.safetensors', which is outside"),
        ({"x": "/etc/passwd"}, "'/etc/passwd', which is outside"),
        ({"x": "a\\..\\b"}, "which is outside"),
        ({"x": "missing.safetensors"}, "is not a model folder: missing.safetensors is missing"),
        ({"x": "pytorch_model-1.bin"}, "'pytorch_model-1.bin', which is not of safetensors"),
        ({"x": 3}, "is damaged"),
        ({}, "is damaged"),
        (["x"], "is damaged"),
    ],
)
def test_an_index_leads_to_files_of_the_folder_alone(weight_map: Any, reason: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    (tmp_path / SINGLE_FILE).unlink()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map, "metadata": {}}))
    with pytest.raises(ModelError, match=reason) as raised:
        open_saved(tmp_path)
    assert "\n" not in str(raised.value)
