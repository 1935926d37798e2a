"""Folders of PEFT as servers read them: the parts are those of PEFT in the client, and bad ones name the fix."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from llmnode.client.absent_blocks import absent_blocks
from llmnode.client.block_adapters import BlockAdapters
from llmnode.core.adapters import MOST_RANK
from llmnode.errors import AdapterError, ConfigError
from llmnode.models.lora import Lora
from llmnode.models.peft_folder import find_adapter, read_adapter, read_named
from llmnode.models.sources.checkpoint import ADAPTER_FILE, ADAPTER_PICKLE_FILE, ADAPTER_WEIGHTS_FILE
from reference.peft_batch import TARGETS, parts_of, with_adapters
from reference.small import BLOCKS, HIDDEN_SIZE, make_model, open_saved, save_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.model import ModelInfo
    from llmnode.models.sources.folder import ModelFolder

pytestmark = pytest.mark.reference

NAME = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"


def saved(case: str, path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelFolder, Any]:
    """A small model, and PEFT's over it with two adapters, which are saved in the folders `one` and `two`."""
    save_model(path / "model", case, tied=False)
    folder = open_saved(path / "model")
    model = with_adapters(case, make_model(case, tied=False))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    model.peft_config["one"].alpha_pattern = {"model.layers.3.self_attn.q_proj": 9} if case == "llama" else {}
    model.save_pretrained(path / "adapters")
    return folder, model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in TARGETS if case in ("llama", "gpt2", "bloom")])
def test_a_folder_gives_the_adapter_of_a_client_that_loads_it_by_peft(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, _ = saved(case, tmp_path, dtype)
    family = "model.layers" if case == "llama" else "transformer.h"
    for name in ("one", "two"):
        path = tmp_path / "adapters" / name
        loaded = peft.PeftModel.from_pretrained(make_model(case, tied=False), path, adapter_name=name)
        expected = BlockAdapters(folder.info.digest, absent_blocks(folder)).adapter(
            {
                block: {layer: Lora(each.a, each.b, each.scale) for layer, each in part.items()}
                for block, part in parts_of(loaded, name, f"{family}.").items()
            }
        )
        found = read_adapter(str(path), folder.info)
        assert expected is not None
        assert found.adapter == expected
        assert found.adapter.digest == expected.digest
        assert found.rank == {"one": 7, "two": 3}[name]
        for text, named in ((str(path), name), (f"other.name={path}", "other.name")):
            renamed = read_named(text, folder.info)
            assert (renamed.name, renamed.adapter.digest) == (named, expected.digest)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, Path]:
    """A model, and a folder with an adapter for it."""
    path = tmp_path_factory.mktemp("llama")
    return saved("llama", path)[0], path / "adapters" / "one"


@pytest.fixture
def copied(llama: tuple[ModelFolder, Path], tmp_path: Path) -> tuple[ModelInfo, Path]:
    """The model, and a copy of the adapter's folder."""
    folder, path = llama
    return folder.info, Path(shutil.copytree(path, tmp_path / "one"))


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / ADAPTER_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / ADAPTER_WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, path / ADAPTER_WEIGHTS_FILE)

    return apply


def only_a_pickle(path: Path) -> None:
    (path / ADAPTER_WEIGHTS_FILE).unlink()
    (path / ADAPTER_PICKLE_FILE).write_bytes(pickle.dumps({"never": "read"}))


def ten_gigabytes(path: Path) -> None:
    os.truncate(path / ADAPTER_WEIGHTS_FILE, 10 << 30)  # sparse


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pickle": (only_a_pickle, "safe_serialization=True"),
    "ten gigabytes": (ten_gigabytes, "use one of lower rank"),
    "cut off": (lambda path: os.truncate(path / ADAPTER_WEIGHTS_FILE, 1000), "is damaged"),
    "nothing": (lambda path: (path / ADAPTER_WEIGHTS_FILE).write_bytes(b""), "is damaged"),
    "no weights": (lambda path: (path / ADAPTER_WEIGHTS_FILE).unlink(), "give a folder that PEFT has saved"),
    "no config": (lambda path: (path / ADAPTER_FILE).unlink(), f"it has no {ADAPTER_FILE}: give the folder that PEFT"),
    "a broken config": (lambda path: (path / ADAPTER_FILE).write_text("{"), ADAPTER_FILE),
    "DoRA": (changed_config(use_dora=True), "DoRA: train one without"),
    "a bias": (changed_config(bias="all"), "biases: train one without"),
    "a head": (changed_config(modules_to_save=["score"]), "modules_to_save"),
    "another method": (changed_config(peft_type="LOHA"), "train one of LoRA"),
    "no alpha": (changed_config(lora_alpha=None), "lora_alpha"),
    "alphas that are no map": (changed_config(alpha_pattern=[1]), "alpha_pattern"),
    "a pattern that is none": (changed_config(alpha_pattern={"(": 2}), "is no layer's name"),
    "a pattern that takes for ever": (changed_config(alpha_pattern={"(a*)*" * 20: 2}), "is no layer's name"),
    "too many patterns": (changed_config(alpha_pattern={f"a{each}": 2 for each in range(4097)}), "alpha_pattern"),
    "an alpha of 400 digits": (changed_config(lora_alpha=10**400), "lora_alpha"),
    "activated LoRA": (changed_config(alora_invocation_tokens=[1, 2]), "aLoRA"),
    "Arrow": (changed_config(arrow_config={"top_k": 3}), "Arrow"),
    "KaSA": (changed_config(kasa_config={"beta": 1}), "KaSA"),
    "MonteCLoRA": (changed_config(monteclora_config={"samples": 1}), "MonteCLoRA"),
    "VeLoRA": (changed_config(velora_config={"num_groups": 1}), "VeLoRA"),
    **{
        f"initialized by {init}": (changed_config(init_lora_weights=init), "another base model")
        for init in ("pissa", "PiSSA_niter_4", "corda", "olora", "loftq", "lora_ga", "new", ["gaussian"])
    },
    "NaN": (changed_tensors(lambda tensors: tensors[NAME].fill_(float("nan"))), "not finite"),
    "an infinity": (changed_tensors(lambda tensors: tensors[NAME][0].fill_(float("inf"))), "not finite"),
    "half of a layer": (changed_tensors(lambda tensors: tensors.pop(NAME)), "one is not there"),
    "shapes that do not fit": (
        changed_tensors(lambda tensors: tensors.update({NAME: torch.ones(5, HIDDEN_SIZE)})),
        "do not fit",
    ),
    "one dimension": (changed_tensors(lambda tensors: tensors.update({NAME: torch.ones(7)})), "do not fit"),
    "a high rank": (
        changed_tensors(
            lambda tensors: tensors.update(
                {
                    NAME: torch.ones(MOST_RANK + 1, HIDDEN_SIZE),
                    NAME.replace("_A", "_B"): torch.ones(HIDDEN_SIZE, MOST_RANK + 1),
                }
            )
        ),
        "lower rank",
    ),
    "a block too many": (
        changed_tensors(lambda tensors: tensors.update({NAME.replace("3", str(BLOCKS)): torch.ones(7, HIDDEN_SIZE)})),
        "is no LoRA matrix of the 5 blocks",
    ),
    "another tree": (
        changed_tensors(lambda tensors: tensors.update({NAME.replace("model.layers", "h"): torch.ones(7, 4)})),
        "is no LoRA matrix",
    ),
    "whole numbers": (
        changed_tensors(lambda tensors: tensors.update({NAME: torch.ones(7, HIDDEN_SIZE, dtype=torch.int32)})),
        "float32, float16 or bfloat16",
    ),
    "no tensors": (changed_tensors(lambda tensors: tensors.clear()), "no tensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_folder_is_refused_with_the_fix(fault: str, copied: tuple[ModelInfo, Path]) -> None:
    info, path = copied
    damage, why = FAULTS[fault]
    damage(path)
    with pytest.raises(AdapterError, match=why) as refused:
        read_adapter(str(path), info)
    assert str(refused.value).startswith(f"the adapter {path}: ")
    assert "model folder" not in str(refused.value)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_a_folder_whose_base_model_was_left_as_it_is_is_plain(init: object, copied: tuple[ModelInfo, Path]) -> None:
    info, path = copied
    before = read_adapter(str(path), info)
    changed_config(init_lora_weights=init)(path)
    assert read_adapter(str(path), info) == before


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("layers.3.self_attn.q_proj", True),
        (r"^model\.layers\.3\.self_attn\.q_proj$", True),
        ("^layers.3.self_attn.q_proj", False),
        ("proj", False),
    ],
)
def test_a_layers_alpha_is_that_of_peft(pattern: str, matches: bool, copied: tuple[ModelInfo, Path]) -> None:
    info, path = copied
    layer = "model.layers.3.self_attn.q_proj"
    assert (get_pattern_key([pattern], layer) == pattern) == matches
    changed_config(alpha_pattern={})(path)
    plain = read_adapter(str(path), info).adapter
    changed_config(alpha_pattern={pattern: 77})(path)
    assert (read_adapter(str(path), info).adapter.parts[3] != plain.parts[3]) == matches


def test_another_base_is_refused_by_its_name_on_the_hub(copied: tuple[ModelInfo, Path]) -> None:
    info, path = copied
    changed_config(base_model_name_or_path="org/other")(path)
    with pytest.raises(AdapterError, match="for the base org/other, and not for org/name"):
        read_adapter(str(path), replace(info, name="org/name"))
    assert read_adapter(str(path), replace(info, name="Org/Other")).base == "org/other"
    assert read_adapter(str(path), info).rank == 7  # a folder's name says nothing


def test_what_is_no_folder_or_no_name_is_refused(copied: tuple[ModelInfo, Path]) -> None:
    info, path = copied
    for text in ("pirate", str(path / "nothing"), "name=nothing"):
        assert find_adapter(text) is None
        with pytest.raises(ConfigError, match="is no folder"):
            read_adapter(text, info)
        with pytest.raises(ConfigError, match="is no folder"):
            read_named(text, info)
    odd = path.parent / "a name"
    path.rename(odd)
    assert find_adapter(str(odd)) == odd
    with pytest.raises(ConfigError, match="give NAME=FOLDER"):
        read_named(str(odd), info)
    assert read_named(f"odd={odd}", info).name == "odd"


def test_a_folders_name_may_be_any_for_a_client_and_is_not_split_where_it_is_one(
    copied: tuple[ModelInfo, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    info, path = copied
    monkeypatch.chdir(path.parent)
    shutil.copytree(path, "lr=1e-4")
    shutil.copytree(path, "1e-4")
    changed_config(lora_alpha=1)(Path("1e-4"))
    expected, other = read_adapter(str(path), info).adapter, read_adapter("1e-4", info).adapter
    assert expected != other
    assert read_adapter("lr=1e-4", info).adapter == expected
    assert read_adapter(str(path.parent / "lr=1e-4"), info).adapter == expected
    with pytest.raises(ConfigError, match="'lr=1e-4' is no name"):
        read_named("lr=1e-4", info)
    assert read_named("rate=lr=1e-4", info).adapter == expected
    Path("link").symlink_to("one")
    assert read_named("link", info).name == "link", "the name of its target is told to nobody"
