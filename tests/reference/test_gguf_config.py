"""Each number in the metadata of a GGUF file becomes part of the model's config, or is refused or reported by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, Keys

from llmnode.errors import ModelError
from llmnode.models.gguf.config import MODEL_TYPES, config_of
from llmnode.models.gguf.file import open_file
from llmnode.models.open_model import open_model
from reference.gguf_files import File, of_any_model
from reference.small import VOCABULARY, WINDOW, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))


def _rope(kind: str, base: float = 10_000.0, **options: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **options}}


_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_PLAIN = {"attention_bias": False}
_MOE = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
_LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}

EXACT: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "biases": ("llama", "llama", {}, {}),
    "heads of another length": ("llama", "llama", {**_PLAIN, "head_dim": 24}, {"attention.key_length": 24}),
    "a base": ("llama", "llama", {**_PLAIN, **_rope("default", 5e5)}, {"rope.freq_base": 5e5}),
    "linear": ("llama", "llama", {**_PLAIN, **_rope("linear", factor=4.0)}, _LINEAR),
    "linear, by the old key": ("llama", "llama", {**_PLAIN, **_rope("linear", factor=4.0)}, {"rope.scale_linear": 4.0}),
    "not scaled": ("llama", "llama", _PLAIN, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn": (
        "llama",
        "llama",
        {**_PLAIN, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)},
        _YARN,
    ),
    "yarn with all of it": (
        "qwen2",
        "qwen2",
        {
            "use_sliding_window": False,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=32,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=0.5 * (0.1 * math.log(4) + 1),
            ),
        },
        {
            **_YARN,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.attn_factor": 0.5,
        },
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 24}, {"attention.key_length": 24, "attention.value_length": 24}),
    "windows": ("phi3", "phi3", {}, {"attention.sliding_window": WINDOW}),
    "a part is rotated": (
        "phi3",
        "phi3",
        {"partial_rotary_factor": 0.5, "sliding_window": None},
        {"rope.dimension_count": 8},
    ),
    "starcoder2": (
        "starcoder2",
        "starcoder2",
        {"sliding_window": None, "norm_epsilon": 1e-5, **_rope("default", 1e6)},
        {**_LAYER_NORM, "rope.freq_base": 1e6},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"n_inner": 96, "scale_attn_by_inverse_layer_idx": False, "activation_function": "gelu_new"},
        {**_LAYER_NORM, "attention.head_count_kv": None, "rope.freq_base": None},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 24},
        {
            "attention.key_length": 24,
            "attention.value_length": 24,
            "attention.sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {"query_pre_attn_scalar": 24, "rope_parameters": _GEMMA3_ROPE},
        {
            "attention.key_length": 24,
            "attention.value_length": 24,
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": [True, True, False, True, False],
            "final_logit_softcapping": 5.0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 2e4,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "experts and a shared one": ("qwen2_moe", "qwen2moe", {}, {**_MOE, "expert_shared_feed_forward_length": 48}),
    "experts": (
        "qwen3_moe",
        "qwen3moe",
        {"mlp_only_layers": []},
        {**_MOE, "attention.key_length": 24, "attention.value_length": 24},
    ),
}
"""The small model, its architecture, what it has that others have not, and the metadata that says so."""


@pytest.mark.parametrize("case", EXACT)
@torch.inference_mode()
def test_it_is_the_model_that_was_converted(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, architecture, options, values = EXACT[case]
    original = make_model(family, tied=architecture.startswith("gemma"), **{"rms_norm_eps": 1e-6, **options})
    file = of_any_model(original, architecture)
    file.values = {f"{architecture}.{name}": value for name, value in values.items()}
    lines: list[str] = []
    folder = open_model(str(file.write(tmp_path / "small.gguf")), lines.append)
    assert len(lines) == 1, lines
    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype="float32").eval()
    ids = torch.randint(VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(4))
    expected = original(ids).logits
    assert (model(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert model.config.model_type == family


def _llama3_factors(head_dim: int, base: float, **options: float) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """transformers' numbers, and the factors that llama.cpp's converter makes of them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = _rope("llama3", base, **options)
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**sizes, **scaling), torch.device("cpu"))
    plain = 1 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return scaling["rope_parameters"], (plain / frequencies).numpy().astype(np.float32)


@pytest.mark.parametrize("base", [5e5, 1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 1.0, 8.0, 8192), (8.0, 2.0, 4.0, 2048)],
)
def test_llama3s_factors_become_the_frequencies_they_were_made_from(
    base: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> None:
    from llmnode.models.gguf.rope import llama3_scaling

    options = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    _, factors = _llama3_factors(head_dim, base, factor=factor, **options)
    found = llama3_scaling(factors.astype(np.float64), head_dim, base)
    assert found is not None
    _, remade = _llama3_factors(head_dim, base, **{name: found[name] for name in ("factor", *options)})
    assert np.allclose(remade, factors, rtol=1e-4)
    if (low, high, original) == (1.0, 4.0, 8192) and found["factor"] == factor:
        assert (found["low_freq_factor"], found["high_freq_factor"]) == (1.0, 4.0)


@torch.inference_mode()
def test_a_model_with_llama3s_factors(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling, factors = _llama3_factors(64, 1e6, factor=8.0, **options)
    original = make_model("llama", tied=False, rms_norm_eps=1e-6, head_dim=64, rope_parameters=scaling, **_PLAIN)
    file = of_any_model(original, "llama", values={"llama.attention.key_length": 64, "llama.rope.freq_base": 1e6})
    file.tensors["rope_freqs.weight"] = factors
    folder = open_model(str(file.write(tmp_path / "small.gguf")))
    assert folder.config.rope_parameters == scaling
    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype="float32").eval()
    ids = torch.randint(VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(4))
    assert torch.allclose(model(ids).logits, original(ids).logits, atol=1e-4)


@pytest.fixture(scope="module")
def llama() -> File:
    return of_any_model(make_model("llama", tied=False, rms_norm_eps=1e-6, **_PLAIN), "llama")


def _read(file: File, path: Path, **values: Any) -> tuple[PreTrainedConfig, list[str]]:
    named = {f"llama.{name}": value for name, value in values.items()}
    changed = File("llama", {**named, **file.values}, dict(file.tensors))
    notes: list[str] = []
    return config_of(open_file(changed.write(path / "small.gguf")), notes), notes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no factor": ({"rope.scaling.type": "yarn"}, "rotary embeddings scaled by yarn without a factor"),
    "longrope": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "scaled by 'longrope'"),
    "a part rotated": ({"rope.dimension_count": 8}, r"for 8 of 16 \(llama\.rope\.dimension_count\)"),
    "a window": ({"attention.sliding_window": 64}, r"in windows \(llama\.attention\.sliding_window\)"),
    "lengths": ({"attention.key_length": 16, "attention.value_length": 8}, "values of other lengths"),
    "experts": ({"expert_count": 8}, r"llama\.expert_count = 8, which is not supported"),
    "a scale": ({"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5"),
    "embeddings": ({"embedding_scale": 12.0}, r"llama\.embedding_scale = 12\.0"),
    "attention": ({"attention.scale": 0.3}, r"llama\.attention\.scale = 0\.3"),
    "softcaps": ({"final_logit_softcapping": 30.0}, r"llama\.final_logit_softcapping"),
    "clamps": ({"attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv"),
    "not causal": ({"attention.causal": False}, r"llama\.attention\.causal = False"),
    "parallel": ({"use_parallel_residual": True}, r"llama\.use_parallel_residual"),
    "of a state space": ({"ssm.state_size": 16}, r"llama\.ssm\.state_size = 16"),
    "more tokens ahead": ({"nextn_predict_layers": 1}, r"llama\.nextn_predict_layers"),
    "blocks that differ": ({"attention.head_count_kv": [2, 1, 2, 2, 2]}, "head_count_kv that differs between blocks"),
    "no blocks": ({"block_count": None}, r"has no llama\.block_count"),
    "too many blocks": (
        {"block_count": 2_000_000_000},
        r"llama\.block_count = 2000000000 and the number of its blocks, 5",
    ),
    "a width": ({"embedding_length": 128}, r"embedding_length = 128 and the width of its embedding, 64"),
    "no heads": ({"attention.head_count": 0}, r"head_count = 0 and a number above 0"),
    "uneven heads": ({"attention.head_count_kv": 3}, "a number of heads that fits"),
    "a text": ({"context_length": "128"}, r"context_length = '128' and a whole number is expected"),
    "a flag": ({"rope.freq_base": True}, "freq_base = True and a number is expected"),
    "no number": ({"attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon = nan and a number"),
    "a base": ({"rope.freq_base": 0.0}, "freq_base = 0.0 and a number above 0"),
    "no context": ({"context_length": 0}, "context_length = 0 and a number above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_numbers_is_refused_by_name(case: str, llama: File, tmp_path: Path) -> None:
    values, says = REFUSED[case]
    with pytest.raises(ModelError, match=says) as raised:
        _read(llama, tmp_path, **values)
    assert "\n" not in str(raised.value) and "small.gguf" in str(raised.value)


def test_what_changes_nothing_is_known(llama: File, tmp_path: Path) -> None:
    plain, _ = _read(llama, tmp_path)
    values = {
        "attention.sliding_window": 128,  # as long as its context
        "attention.scale": 0.25,  # what it is anyway
        "attention.causal": True,
        "expert_count": 0,
        "logit_scale": 1.0,
        "rope.scaling.finetuned": True,
        "rope.scaling.factor": 1.0,
        "tensor_data_layout": "Meta AI original pth",
        "vocab_size": 7,  # of which llama.cpp believes the tokens
        "attention.head_count_kv": [2, 2, 2, 2, 2],
        "feed_forward_length": [96, 96, 96, 96, 96],
    }
    llama = File("llama", {"general.name": "Small", "quantize.imatrix.file": "x"}, llama.tensors)
    same, notes = _read(llama, tmp_path, **values)
    assert notes == []
    assert {**plain.to_dict(), "_model_name_or_path": "Small"} == same.to_dict()
    ones = File("llama", {}, {**llama.tensors, "rope_freqs.weight": np.ones(8, np.float32)})
    assert _read(ones, tmp_path)[0].rope_parameters == plain.rope_parameters


def test_what_nobody_knows_is_told_at_each_start(llama: File, tmp_path: Path) -> None:
    file = File("llama", {"llama.frobnication": 3, "tokenizer.ggml.dialect": "x"}, llama.tensors)
    path = file.write(tmp_path / "small.gguf")
    told = [
        "llama.frobnication is not understood and left out",
        "tokenizer.ggml.dialect is not understood and left out",
    ]
    for _ in range(2):
        lines: list[str] = []
        open_model(str(path), lines.append)
        assert [line for line in lines if "converting" not in line] == [f"small: {line}" for line in told]


def test_a_file_full_of_what_nobody_knows_is_told_in_few_lines(llama: File, tmp_path: Path) -> None:
    path = File("llama", {f"llama.x{index}": 1 for index in range(30)}, llama.tensors).write(tmp_path / "small.gguf")
    lines: list[str] = []
    open_model(str(path), lines.append)
    assert len(lines) == 12 and lines[-1] == "small: 20 more keys are not understood and left out"


def test_factors_that_are_no_scaling_we_know_are_refused(llama: File, tmp_path: Path) -> None:
    for factors in (np.arange(1, 9), np.ones(7), np.full(8, np.nan), np.zeros(8)):
        tensors = {**llama.tensors, "rope_freqs.weight": factors.astype(np.float32)}
        with pytest.raises(ModelError, match=r"factors \(rope_freqs\.weight\) that are not those of Llama 3"):
            _read(File("llama", {}, tensors), tmp_path)
    tensors = {**llama.tensors, "rope_factors_long.weight": np.ones(8, np.float32)}
    with pytest.raises(ModelError, match=r"factors \(rope_factors_long\.weight, longrope\)"):
        _read(File("llama", {}, tensors), tmp_path)


def test_a_model_named_mistral_is_the_model_in_the_file(llama: File, tmp_path: Path) -> None:
    """transformers takes it for another family, which it then cannot load."""
    config, _ = _read(File("llama", {"general.name": "mistral"}, llama.tensors), tmp_path)
    assert config.model_type == "llama" and getattr(config, "sliding_window", None) is None


def test_more_tokens_than_the_embedding_has_are_refused(llama: File, tmp_path: Path) -> None:
    tokens = [*llama.metadata["tokenizer.ggml.tokens"], "more"]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": None}
    path = File("llama", values, llama.tensors).write(tmp_path / "small.gguf")
    with pytest.raises(ModelError, match=r"has 212 tokens, of which its embedding has 211"):
        open_model(str(path))


def test_tensors_of_an_older_quantization_are_refused(llama: File, tmp_path: Path) -> None:
    old = {"general.quantization_version": 1}
    _read(File("llama", old, llama.tensors), tmp_path)
    file = File("llama", old, llama.tensors, GGMLQuantizationType.Q8_0)
    with pytest.raises(ModelError, match="tensors of the quantization version 1"):
        config_of(open_file(file.write(tmp_path / "small.gguf")), [])


def test_each_architecture_is_one_that_transformers_and_gguf_know() -> None:
    from gguf import MODEL_ARCH_NAMES
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    for architecture, family in MODEL_TYPES.items():
        assert architecture in MODEL_ARCH_NAMES.values()
        assert family.removesuffix("_text") in GGUF_CONFIG_MAPPING


def test_all_keys_of_the_specification_have_a_meaning_here(llama: File, tmp_path: Path) -> None:
    """With a value of the wrong kind for all of them, none is left out in silence."""
    groups = [group for group in vars(Keys).values() if isinstance(group, type)]
    names = [
        name.removeprefix("{arch}.") for group in groups for name in vars(group).values() if "{arch}." in str(name)
    ]
    silent = []
    for name in filter(lambda name: "{" not in name, names):
        said: list[str] = []
        try:
            said = _read(llama, tmp_path, **{name: "strange"})[1]
        except ModelError as error:
            said = [str(error)]
        silent += [name] if not any(f"llama.{name}" in line for line in said) else []
    assert sorted(silent) == ["rope.scaling.finetuned", "tensor_data_layout", "vocab_size"]
