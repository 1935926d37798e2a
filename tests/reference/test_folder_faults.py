"""For any fault of a model folder, our model has the weights that transformers gives, or one line says why not.

Folders are drawn (`reference/folder_faults.py`); LLMNODE_SEEDS=5000 draws 5000 of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.compute.load_executor import load_executor
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.models.families import FAMILIES
from llmnode.models.layers import join_products
from llmnode.models.load import load_ends
from llmnode.models.open_model import open_model
from reference.folder_faults import FAULTS, HARMLESS
from reference.small import KV_TOKENS, Cut, make_model, session

if TYPE_CHECKING:
    from llmnode.models.sources.folder import ModelFolder

pytestmark = pytest.mark.reference

DRAWS = int(os.environ.get("LLMNODE_SEEDS", "100"))
TINY = {"num_hidden_layers": 2, "vocab_size": 50}
FOLDERS = [
    (case, tied, sharded)
    for case, tied in (("llama", False), ("llama", True), ("qwen3", False), ("gpt2", True), ("mixtral", False))
    for sharded in (False, True)
]
TOKENS = [3, 1, 4, 1, 5]
FAULT = st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 2**20))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders")
    for number, (case, tied, sharded) in enumerate(FOLDERS):
        model = make_model(case, tied=tied, **TINY)
        model.save_pretrained(path / str(number), max_shard_size="30KB" if sharded else "1GB")
    return path


@pytest.mark.parametrize(("nr", "name"), list(enumerate(FAULTS)))
def test_each_fault_alone(nr: int, name: str, saved: Path) -> None:
    for number in range(nr % 2, len(FOLDERS), 3):
        _compare(saved / str(number), [(name, number)])


@settings(settings.get_profile("reference"), max_examples=DRAWS)
@given(number=st.integers(0, len(FOLDERS) - 1), faults=st.lists(FAULT, min_size=2, max_size=4))
def test_whatever_is_wrong(saved: Path, number: int, faults: list[tuple[str, int]]) -> None:
    _compare(saved / str(number), faults)


def _compare(whole: Path, faults: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(whole, Path(temporary) / "ein Modell ü")
        for name, seed in faults:
            FAULTS[name](folder, Random(seed))
        theirs, why = _by_transformers(folder)
        ours, refusal = _by_us(folder)
        print(faults, "\ntransformers:", why or "loads it", "\nwe:", refusal or "load it")
        if ours is None:
            assert "\n" not in refusal
            assert theirs is None or not {name for name, _ in faults} <= HARMLESS.keys(), refusal
            return
        assert theirs is not None, why
        scores = ours.pop("scores"), theirs.pop("scores")
        same = ours.keys() & theirs.keys()  # not what is in fewer bits here
        assert same
        for name in same:
            assert torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()), name
        if all(each.isfinite().all() for each in theirs.values()):  # else by the order of sums
            assert torch.allclose(*scores, rtol=1e-3, atol=1e-3, equal_nan=True)


def _by_transformers(folder: Path) -> tuple[dict[str, torch.Tensor] | None, str]:
    """None if it does not load it, or makes up weights."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity(logging.CRITICAL)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # Any: a pair, against its type
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
        if info["missing_keys"]:
            return None, f"makes up {sorted(info['missing_keys'])}"
        return _state(model), ""
    except Exception as error:  # noqa: BLE001 - whatever it is, it does not load it
        return None, f"{type(error).__name__}: {error}"


def _state(model: Any) -> dict[str, torch.Tensor]:
    """Its tensors, of which a span has some joined; and what the model scores, if it runs."""
    with torch.inference_mode():
        scores = model(torch.tensor([TOKENS])).logits[0]
    family = FAMILIES[model.config.model_type]
    if family.fused:
        for block in getattr(model.get_submodule(family.decoder), family.blocks):
            join_products(block)
    return {**model.state_dict(), "scores": scores}


def _by_us(folder: Path) -> tuple[dict[str, torch.Tensor] | None, str]:
    try:
        opened = open_model(str(folder))
        executor = load_executor(opened, Span(0, opened.info.blocks), KV_TOKENS)
        return _tensors(opened, Cut(load_ends(opened), [executor])), ""
    except (ConfigError, ModelError) as error:
        return None, str(error)


def _tensors(opened: ModelFolder, whole: Cut) -> dict[str, torch.Tensor]:
    family = FAMILIES[opened.config.model_type]
    blocks, ends = whole.executors[0].model.blocks, whole.ends
    tensors = {f"{family.block_prefix}{name}": each for name, each in blocks.state_dict().items()}
    tensors |= {f"{family.decoder}.{name}": each for name, each in ends.embedding.state_dict().items()}
    scores = ends.logits(whole.forward({session(0): TOKENS})[session(0)])
    return tensors | ends.scoring.state_dict() | {"scores": scores}
