"""transformers is asked once about a config, and the blocks that are built from its answer are exact: see
`test_families.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

from llmnode.errors import ModelError
from llmnode.models import blueprint
from llmnode.models.blueprint import kept_blueprint
from llmnode.models.draw_blueprint import blueprint_of, plan_of
from llmnode.models.sources.checkpoint import CONFIG_FILE
from reference.small import BLOCKS, VOCABULARY, cut, deviation, make_model, open_saved, save_model, session

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.reference

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SECOND_START = """
import sys

import llmnode.compute.child
from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.core.ids import SessionId
from llmnode.core.span import Span
from llmnode.core.operations import Open, Slice

loader = SpanLoader(Wanted(sys.argv[1], kv_memory="64MiB", threads=1), print)
model = loader.open_model()
assert loader.fitting_blocks() == model.blocks
executor = loader.load(Span(0, model.blocks)).executor
session = SessionId(bytes(16))
assert executor.apply(Open(session, executor.span, 100))
hidden = bytes.fromhex(sys.stdin.read())
(output,) = executor.forward([Slice(session, 0, len(hidden) // model.hidden_size // 4, hidden)])
assert not {"transformers", "torch._dynamo"} & sys.modules.keys()
print(bytes(output).hex())
"""
"""A worker does this for any options of `serve`."""


@pytest.mark.parametrize("case", ["llama-yarn", "mistral", "qwen2", "qwen3-window", "smollm3"])
def test_it_is_drawn_once_and_kept(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, case, tied=False)
    drawn, info = blueprint_of(open_saved(tmp_path)), open_saved(tmp_path).info
    assert drawn is not None and (len(drawn.blocks), drawn.hidden_size) == (BLOCKS, info.hidden_size)
    monkeypatch.setattr("llmnode.models.draw_blueprint.without_weights", None)
    assert blueprint_of(open_saved(tmp_path)) == drawn
    assert open_saved(tmp_path).info == info
    changed = {**json.loads((tmp_path / CONFIG_FILE).read_text()), "rms_norm_eps": 1e-3}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(changed))
    assert kept_blueprint(tmp_path / CONFIG_FILE) is None, "of another config"


def test_a_second_start_needs_no_transformers_no_compiler_and_computes_the_same(
    tmp_path: Path, blueprints: Path
) -> None:
    save_model(tmp_path / "model", "qwen3", tied=False)
    folder = open_saved(tmp_path / "model")
    whole = cut(folder, (0, BLOCKS))
    expected = whole.forward({session(0): TOKENS})[session(0)]
    given = whole.ends.embed(TOKENS, 0).numpy().tobytes()
    done = subprocess.run(
        [sys.executable, "-c", SECOND_START, str(folder.path)],
        input=given.hex(),
        env={**os.environ, "LLMNODE_CACHE": str(blueprints)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert bytes.fromhex(done.stdout) == expected.numpy().tobytes()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"blocks": []}', b'{"blocks": [{"shapes": 1}]}'])
def test_one_that_cannot_be_read_is_drawn_anew(content: bytes, tmp_path: Path, blueprints: Path) -> None:
    save_model(tmp_path, "llama", tied=True, hidden_act="relu")
    before = {*blueprints.rglob("*.json")}
    drawn = blueprint_of(open_saved(tmp_path))
    for kept in {*blueprints.rglob("*.json")} - before:
        kept.write_bytes(content)
        assert kept_blueprint(tmp_path / CONFIG_FILE) is None
    assert blueprint_of(open_saved(tmp_path)) == drawn == kept_blueprint(tmp_path / CONFIG_FILE)


def test_that_of_another_version_of_transformers_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama", tied=True)
    assert blueprint_of(open_saved(tmp_path)) == kept_blueprint(tmp_path / CONFIG_FILE) is not None
    monkeypatch.setattr("importlib.metadata.version", lambda _distribution: "6.0.0")
    monkeypatch.setattr(blueprint, "_transformers_version", blueprint._transformers_version.__wrapped__)
    assert kept_blueprint(tmp_path / CONFIG_FILE) is None


def test_without_a_place_to_keep_it_a_model_is_loaded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama", tied=True, rms_norm_eps=1e-4)
    monkeypatch.setattr("llmnode.models.blueprint.cache_folder", Mock(side_effect=PermissionError))
    whole = cut(open_saved(tmp_path), (0, BLOCKS))
    assert whole.forward({session(0): TOKENS})[session(0)].isfinite().all()
    assert kept_blueprint(tmp_path / CONFIG_FILE) is None


@torch.inference_mode()
def test_a_model_with_an_activation_that_we_do_not_have_is_run_by_transformers(tmp_path: Path) -> None:
    model = make_model("llama", tied=False, hidden_act="gelu_new")
    model.save_pretrained(tmp_path)
    folder, tokens = open_saved(tmp_path), torch.tensor([TOKENS]) % VOCABULARY
    assert blueprint_of(folder) is None
    whole = cut(folder, (0, 2, BLOCKS))
    scores = whole.ends.logits(whole.forward({session(0): TOKENS})[session(0)])
    assert (scores - model(tokens).logits[0]).abs().max() < 4 * deviation(model, tokens)


def test_what_transformers_computes_otherwise_than_we_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    save_model(tmp_path, "llama", tied=False, rms_norm_eps=1e-2)
    theirs: Any = LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        LlamaRotaryEmbedding, "forward", lambda *given, **named: [2 * each for each in theirs(*given, **named)]
    )
    with pytest.raises(ModelError, match=r"'llama' .* turns heads .* another version of transformers"):
        blueprint_of(open_saved(tmp_path))


def test_a_block_with_a_layer_that_we_do_not_know_is_refused() -> None:
    block = make_model("llama", tied=False).model.layers[0]
    block.post_mlp_layernorm = torch.nn.LayerNorm(8)
    with pytest.raises(ModelError, match=r"LlamaDecoderLayer has post_mlp_layernorm .* another version of transf"):
        plan_of(block)
