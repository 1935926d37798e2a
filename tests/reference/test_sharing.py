"""Adapters that are saved or pushed name their base as others find it, and no path of this machine.

The hub is one on loopback (`reference/hub.py`); huggingface_hub, transformers and PEFT are the real ones. There is no
swarm: what is saved is with the client.
"""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import peft
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import ModelCard, constants
from safetensors import safe_open

from llmnode.client.causal_lm import DistributedModelForCausalLM
from llmnode.client.distributed import Connection
from llmnode.errors import AdapterError, ConfigError
from llmnode.models.load import load_ends
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.models.open_model import open_model
from llmnode.models.peft_folder import read_adapter
from llmnode.models.sources.hub_list import adapters_on_hub
from reference.hub import NAME, Repository, the_hub
from reference.small import make_model, open_saved, save_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llmnode.models.sources.folder import ModelFolder
    from reference.hub import Hub

pytestmark = pytest.mark.reference

COMMIT = "a" * 40
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a base, which users of PEFT and transformers ask too."""
    with the_hub(tmp_path, monkeypatch) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # it remembers the address of a hub
        save_model(tmp_path / "base", "llama", tied=False)
        hub.repositories[NAME] = Repository.of(tmp_path / "base")
        yield hub


def distributed(folder: ModelFolder) -> DistributedModelForCausalLM:
    """The model as `connect` would give it, without a swarm."""
    client: Any = Mock(model=folder.info, adapter=None)
    portal: Any = None
    with patch("llmnode.client.distributed.SwarmPasses", lambda *_arguments: SimpleNamespace(model=folder.info)):
        return DistributedModelForCausalLM(Connection(folder, load_ends(folder), client, portal, ExitStack()))


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config


def card_of(folder: Path) -> Any:  # Any: as huggingface_hub types it
    return ModelCard((folder / "README.md").read_text()).data


def check_no_path(files: dict[str, bytes], tmp_path: Path) -> None:
    """Nothing in them names a folder of this machine: the hub's cache, the base and adapters are all in `tmp_path`."""
    assert files
    assert [name for name, content in files.items() if str(tmp_path).encode() in content] == []


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_saved_adapter_names_its_base_and_revision_and_peft_alone_loads_both(hub: Hub, tmp_path: Path) -> None:
    model = peft.get_peft_model(distributed(open_model(NAME)), peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "saved", tmp_path / "saved" / "second"):
        config = config_of(folder)
        assert (config["base_model_name_or_path"], config["revision"]) == (NAME, COMMIT)
        assert config["task_type"] == "CAUSAL_LM"
    card = card_of(tmp_path / "saved")
    assert (card.base_model, card.pipeline_tag) == (NAME, "text-generation")
    assert {"llmnode", "text-generation", f"base_model:adapter:{NAME}", f"base_model_revision:{COMMIT}"} <= {*card.tags}
    check_no_path(files_in(tmp_path / "saved"), tmp_path)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
    asked = {each.path for each in hub.asked if each.path.startswith(f"/{NAME}/resolve/")}
    assert f"/{NAME}/resolve/{COMMIT}/config.json" in asked
    ours, theirs = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(loaded)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    base = loaded.get_base_model().model.embed_tokens.weight
    assert torch.equal(base, make_model("llama", tied=False).model.embed_tokens.weight)


def test_what_is_pushed_is_what_is_saved_and_the_hub_lists_it(hub: Hub, tmp_path: Path) -> None:
    made = distributed(open_model(NAME))
    model = peft.get_peft_model(made, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    model.push_to_hub("me/plain")
    model.push_to_hub("me/pirate", tags=model.model_tags)
    for name in ("me/plain", "me/pirate"):
        pushed = hub.repositories[name]
        config = json.loads(pushed.files["adapter_config.json"])
        assert (config["base_model_name_or_path"], config["revision"]) == (NAME, COMMIT)
        check_no_path(pushed.files, tmp_path)
    assert {"text-generation", f"base_model:adapter:{NAME}", f"base_model_revision:{COMMIT}"} <= {*pushed.tags}
    assert [each.name for each in adapters_on_hub(NAME, 5)] == ["me/pirate"]
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained("me/pirate")
    ours, theirs = peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(loaded)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_adapter("me/pirate", made.info).base == NAME
    with pytest.raises(AdapterError, match=f"for the base {NAME}, and not for org/other"):
        read_adapter("me/pirate", replace(made.info, name="org/other"))


@pytest.mark.parametrize(
    ("config", "head", "task"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), None, "text-generation"),
        (peft.PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=3), "sequence", "text-classification"),
        (peft.LoraConfig(task_type="TOKEN_CLS", **LORA), "token", "token-classification"),
    ],
    ids=["a prompt", "a prompt and a head", "a head"],
)
def test_prompts_and_heads_do_so_too(config: Any, head: str | None, task: str, hub: Hub, tmp_path: Path) -> None:
    made: Any = distributed(open_model(NAME))
    made = made if head is None else made.with_head(f"{head}-classification", num_labels=2)
    peft.get_peft_model(made, copy.deepcopy(config)).save_pretrained(tmp_path / "saved")
    saved = config_of(tmp_path / "saved")
    assert (saved["base_model_name_or_path"], saved["revision"]) == (NAME, COMMIT)
    assert task in card_of(tmp_path / "saved").tags
    check_no_path(files_in(tmp_path / "saved"), tmp_path)


def test_an_adapter_of_transformers_and_a_head_do_so_too(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers 5.24 asks for a PEFT that is not published yet.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    model: Any = distributed(open_model(NAME))
    model.add_adapter(peft.LoraConfig(**LORA))
    model.save_pretrained(tmp_path / "saved", max_shard_size="5GB")
    saved = config_of(tmp_path / "saved")
    assert (saved["base_model_name_or_path"], saved["revision"]) == (NAME, COMMIT)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as opened:
        facts = opened.metadata()
    assert (facts["base_model"], facts["base_model_revision"]) == (NAME, COMMIT)
    assert facts["base_model_digest"] == model.info.digest.hex()
    check_no_path(files_in(tmp_path / "saved"), tmp_path)


def test_a_model_of_this_machine_has_a_plain_name_and_no_revision(
    hub: Hub, tmp_path: Path, folder: ModelFolder
) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
    peft.get_peft_model(distributed(open_model(NAME)), config).save_pretrained(tmp_path / "first")
    model: Any = peft.get_peft_model(distributed(open_saved(tmp_path / "base")), config)
    model.save_pretrained(tmp_path / "saved")
    saved = config_of(tmp_path / "saved")
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("small", None), "nor that of the other model"
    assert card_of(tmp_path / "saved").base_model == "small"
    digest = f"base_model_digest:{model.info.digest.hex()}"
    assert {digest, "text-generation"} <= {*card_of(tmp_path / "saved").tags}
    check_no_path(files_in(tmp_path / "saved"), tmp_path)
    assert folder.config.name_or_path == EMBEDDED_MODEL


def test_an_adapter_of_an_earlier_llmnode_loses_its_path(hub: Hub, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    peft.get_peft_model(distributed(open_model(NAME)), peft.LoraConfig(**LORA)).save_pretrained(saved)
    before = config_of(saved) | {"base_model_name_or_path": str(tmp_path / "cache"), "revision": None}
    (saved / "adapter_config.json").write_text(json.dumps(before))
    peft.PeftModel.from_pretrained(distributed(open_model(NAME)), saved).save_pretrained(tmp_path / "again")
    again = config_of(tmp_path / "again")
    assert (again["base_model_name_or_path"], again["revision"]) == (NAME, COMMIT)


def test_a_revision_that_the_user_has_named_stays(hub: Hub, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA)
    model = peft.get_peft_model(distributed(open_model(NAME)), config, revision="v1")
    model.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved")["revision"] == "v1"


def test_options_of_saving_are_done_or_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "base", "llama", tied=False)
    model = distributed(open_saved(tmp_path / "base")).with_head("sequence-classification", num_labels=2)
    saved = tmp_path / "saved"
    refused = {"push_to_hub": True, "variant": "fp16", "safe_serialization": False, "save_peft_format": False, "new": 1}
    for name, value in refused.items():
        with pytest.raises(ConfigError, match="push a model of PEFT" if name == "push_to_hub" else f"leave out {name}"):
            model.save_pretrained(saved, **{name: value})
    model.save_pretrained(saved, is_main_process=False)
    assert not saved.exists()
    given = {"score.weight": torch.full_like(model.score.weight, 3)}
    model.save_pretrained(saved, state_dict=given, push_to_hub=False, variant=None, max_shard_size="1GB")
    with safe_open(saved / "model.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("score.weight"), given["score.weight"])
        assert "base_model_revision" not in opened.metadata()
