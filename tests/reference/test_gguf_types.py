"""Each type of tensor that `gguf` can dequantize is read, to the number; the others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llmnode.errors import ModelError
from llmnode.models.gguf.file import open_file, readable_types
from llmnode.models.open_model import open_model
from llmnode.models.sources.checkpoint import SINGLE_FILE
from reference.gguf_files import File, of_model
from reference.small import make_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # infinite scales

READ = [GGMLQuantizationType[name] for name in readable_types()]
UNREAD = sorted(set(GGMLQuantizationType) - set(READ))
WIDTH = 256  # a multiple of every type's block


def _random_bytes(kind: GGMLQuantizationType, rows: int, seed: int) -> np.ndarray[Any, Any]:
    """Rows of blocks of any bytes. Some scales are infinite, or no numbers."""
    block, size = GGML_QUANT_SIZES[kind]
    width = WIDTH // block * size
    raw = np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return raw.view(plain[kind]) if kind in plain else raw


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def wide() -> File:
    model = make_model("llama", tied=False, attention_bias=False, num_hidden_layers=5, hidden_size=WIDTH)
    sizes = {"llama.embedding_length": WIDTH, "llama.attention.head_count": 4}
    return of_model(model, "llama", values=sizes)


def test_all_kinds_that_are_in_use_are_read() -> None:
    kinds = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4"
    kinds += " IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"
    assert set(kinds.split()) <= set(readable_types())
    assert UNREAD


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_a_model_with_tensors_of_this_type_has_their_numbers(
    kind: GGMLQuantizationType, wide: File, tmp_path: Path
) -> None:
    names = {"blk.0.ffn_gate.weight": "mlp.gate_proj", "blk.3.ffn_up.weight": "mlp.up_proj"}
    raw = {name: _random_bytes(kind, 96, seed) for seed, name in enumerate(names)}
    file = File("llama", wide.values, {**wide.tensors, **raw}, types=dict.fromkeys(raw, kind))
    folder = open_model(str(file.write(tmp_path / "small.gguf")))
    stored = load_file(folder.path / SINGLE_FILE)
    for name, theirs in names.items():
        expected = gguf.dequantize(raw[name], kind)
        found = stored[f"model.layers.{name[4]}.{theirs}.weight"]
        assert found.dtype == np.float32
        assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", UNREAD, ids=lambda kind: kind.name)
def test_others_are_refused_by_name(kind: GGMLQuantizationType, wide: File, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.zeros((96, WIDTH // block * size), np.uint8)
    plain = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F64": np.float64}
    tensor = raw.view(plain[kind.name]) if kind.name in plain else raw
    file = File("llama", wide.values, {**wide.tensors, "blk.0.ffn_gate.weight": tensor})
    file.types["blk.0.ffn_gate.weight"] = kind
    says = (
        rf"tensors of the type {kind.name} \(blk\.0\.ffn_gate\.weight\), which cannot be dequantized: use one of F32,"
    )
    with pytest.raises(ModelError, match=says) as raised:
        open_model(str(file.write(tmp_path / "small.gguf")))
    assert "\n" not in str(raised.value)


@settings(settings.get_profile("reference"), max_examples=60)
@given(kind=st.sampled_from(READ), rows=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_a_files_tensors_are_its_bytes(
    kind: GGMLQuantizationType, rows: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = _random_bytes(kind, rows, seed)
    file = File(
        "llama", {}, {"odd": np.ones(3, np.float32), "token_embd.weight": raw}, types={"token_embd.weight": kind}
    )
    tensor = open_file(file.write(tmp_path_factory.mktemp("file") / "small.gguf")).tensors["token_embd.weight"]
    assert tensor.tensor_type == kind
    assert np.array_equal(tensor.data, raw, equal_nan=raw.dtype.kind == "f")
    assert [int(length) for length in tensor.shape] == [WIDTH, rows]
