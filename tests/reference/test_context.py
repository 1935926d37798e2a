"""How long a sequence a model was made for, by all that configs say of it; and all of that length is exact."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmnode.client.generate import check_length
from llmnode.errors import ConfigError, ModelError
from llmnode.models.context import Context, context_of
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.families import FAMILIES
from llmnode.models.ropes import KNOWN_ROPES
from llmnode.models.sources.checkpoint import CONFIG_FILE
from llmnode.models.sources.folder import read_config
from reference.small import (
    BLOCKS,
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
    from pathlib import Path

pytestmark = pytest.mark.reference

HALVES = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}  # of a head of 16
OF_TYPES = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
DYNAMIC = "beyond it its rotary embeddings, of the type 'dynamic', change with the length"
FORGETS = "beyond it transformers' cache forgets what its attention has no window for: sliding_window"
LONGROPE = DYNAMIC.replace("dynamic", "longrope")


def _old(kind: str, **options: Any) -> dict[str, Any]:
    """The old form of rope scaling, as in most configs on the hub."""
    return {"rope_theta": 10000.0, "rope_scaling": {"type": kind, **options}}


def _new(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


TOLD: dict[str, tuple[str, dict[str, Any], Context]] = {
    "none": ("llama", {}, Context(64)),
    "default": ("llama", _new("default"), Context(64)),
    "null": ("llama", {"rope_scaling": None}, Context(64)),
    "linear": ("llama", _old("linear", factor=4.0), Context(256)),
    "linear, by its newer key": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4}}, Context(256)),
    "linear, by its newest name": ("llama", _new("linear", factor=4), Context(256)),
    "linear, of another first length": (
        "llama",
        _new("linear", factor=4.0, original_max_position_embeddings=16),
        Context(64),
    ),
    "linear, by a part": ("llama", _old("linear", factor=1.5), Context(96)),
    "linear, by less": ("llama", _old("linear", factor=0.5), Context(64)),
    "linear, not a number": ("llama", {**_old("linear", factor=float("nan"))}, Context(64)),
    "linear, without end": ("llama", _old("linear", factor=1e30), Context(2**32 - 1)),
    "linear, Vicuna 16k": ("llama", {**_old("linear", factor=4.0), "max_sequence_length": 256}, Context(256)),
    "yarn": ("qwen2", _old("yarn", factor=4.0, original_max_position_embeddings=64), Context(256)),
    "yarn, that of the config": ("qwen2", _old("yarn", factor=4.0), Context(256)),
    "yarn, included": ("qwen3", _old("yarn", factor=4.0, original_max_position_embeddings=16), Context(64)),
    "yarn, Qwen3": ("qwen3", _old("yarn", factor=4.0, original_max_position_embeddings=32), Context(128)),
    "yarn, in its newest form": ("mistral", _new("yarn", factor=2, original_max_position_embeddings=64), Context(128)),
    "llama3": (
        "llama",
        _old("llama3", factor=8.0, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=32),
        Context(64),
    ),
    "proportional": ("llama", _new("proportional", factor=8.0, partial_rotary_factor=0.5), Context(64)),
    "dynamic": ("llama", _old("dynamic", factor=4.0), Context(64, DYNAMIC)),
    "dynamic, newer": ("falcon-new", _new("dynamic", factor=4.0), Context(64, DYNAMIC)),
    "longrope": ("phi3", {**_old("longrope", **HALVES), "original_max_position_embeddings": 16}, Context(16, LONGROPE)),
    "longrope, su": ("phi3", _old("su", **HALVES, original_max_position_embeddings=16), Context(16, LONGROPE)),
    "longrope of another": (
        "llama",
        _new("longrope", **HALVES, original_max_position_embeddings=16),
        Context(16, LONGROPE),
    ),
    "longrope, no longer": ("llama", _new("longrope", **HALVES, factor=4.0), Context(64, LONGROPE)),
    "gemma3": ("gemma3_text", {"rope_parameters": OF_TYPES}, Context(64)),
    "gemma3, older": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, Context(64)),
    "gpt2": ("gpt2", {"max_position_embeddings": None, "n_positions": 48, "n_ctx": 48}, Context(48)),
    "a table, whatever else is told": ("opt", {"max_sequence_length": 4096}, Context(64)),
    "bloom": ("bloom", {"max_position_embeddings": None}, Context(2048)),
    "bloom, longer": ("bloom", {"max_position_embeddings": None, "seq_length": 4096}, Context(4096)),
    "alibi is not stretched": ("falcon-alibi", _new("linear", factor=4.0), Context(64)),
    "a window of no family": ("llama", {"sliding_window": 8}, Context(8, FORGETS)),
    "a window beside a table": ("gpt2", {"sliding_window": 8}, Context(8, FORGETS)),
    "a window that is larger": ("llama", {"sliding_window": 4096}, Context(64)),
    "a window of its own": ("mistral", {"sliding_window": 8}, Context(64)),
    "command-r": ("cohere", {"model_max_length": 512}, Context(512)),
    "neox": ("gpt_neox", _old("linear", factor=2.0), Context(128)),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_context_is_what_the_config_says(name: str, tmp_path: Path) -> None:
    case, change, expected = TOLD[name]
    _write_config(case, tmp_path, change)
    config = read_config(tmp_path)
    assert context_of(config, FAMILIES[config.model_type]) == expected


def _write_config(case: str, path: Path, change: dict[str, Any]) -> None:
    """The config of a small model with 64 positions. A value of None is left out, except in `rope_scaling`."""
    from reference.small import make_config

    make_config(case, max_position_embeddings=64).save_pretrained(path)
    config = json.loads((path / CONFIG_FILE).read_text())
    if change.keys() & {"rope_scaling", "rope_parameters"}:
        config.pop("rope_parameters", None)
    config = {key: value for key, value in {**config, **change}.items() if value is not None or key == "rope_scaling"}
    (path / CONFIG_FILE).write_text(json.dumps(config))


@pytest.mark.parametrize("length", [None, 0, -1, "64", 6.4])
def test_a_config_without_a_length_is_refused(length: object, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "max_position_embeddings": length}))
    with pytest.raises(ModelError, match="max_position_embeddings"):
        _ = open_saved(tmp_path).info


EXACT = {
    "linear": _new("linear", factor=4.0),
    "yarn": _new("yarn", factor=3.0, original_max_position_embeddings=16),
    "llama3": _new(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    ),
    "proportional": _new("proportional", factor=4.0, partial_rotary_factor=0.5),
    "dynamic": _new("dynamic", factor=4.0),
    "longrope": _new("longrope", short_factor=[1.5] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=12),
}
assert {*EXACT, "default"} == {*KNOWN_ROPES}


@pytest.mark.parametrize("case", ["llama", "qwen2", "granite", "gpt_neox", "falcon-new"])
@pytest.mark.parametrize("kind", EXACT)
@torch.inference_mode()
def test_every_position_of_it_is_exact(case: str, kind: str, tmp_path: Path) -> None:
    """Prefilled in parts and decoded, beside another sequence."""
    if case == "gpt_neox":
        rope = {**EXACT[kind]["rope_parameters"], "partial_rotary_factor": 1.0}
        model = make_model(case, tied=False, max_position_embeddings=16, rope_parameters=rope)
    else:
        options = {"num_attention_heads": 4} if family_of_case(case) == "falcon" else {}
        model = make_model(case, tied=False, max_position_embeddings=16, **EXACT[kind], **options)
    model.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    tokens = min(folder.info.context_tokens, 64)
    assert tokens == {"linear": 64, "yarn": 48, "longrope": 12}.get(kind, 16)
    ids = torch.randint(VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))
    ours = cut(folder, (0, 3, BLOCKS))
    parts = [ids[:, : tokens - 6], *ids[:, tokens - 6 :].split(1, dim=1)]
    outputs = [
        ours.forward({session(row): part[row].tolist() for row in range(2 if number else 1)})
        for number, part in enumerate(parts)
    ]
    scores = ours.ends.logits(torch.cat([each[session(0)] for each in outputs]))
    expected = model(ids[:1]).logits[0]
    assert (scores - expected).abs().max() < max(4 * deviation(model, ids[:1]), 1e-5)
    if FAMILIES[folder.config.model_type].fused:
        blueprint = blueprint_of(folder)
        assert blueprint is not None and blueprint.context == context_of(folder.config, FAMILIES["llama"])


def test_a_prompt_beyond_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True, max_position_embeddings=16, **EXACT["longrope"])
    info = open_saved(tmp_path).info
    assert check_length(8, 4, info) == 12
    with pytest.raises(ConfigError, match=r"context of 12 \(beyond it .* 'longrope', change .*: shorten the prompt"):
        check_length(8, 5, info)
