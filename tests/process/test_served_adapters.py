"""Adapters that real servers announce: a client that names one gets what PEFT gives over the whole model."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import llmnode
from llmnode.errors import AdapterError, ConfigError, LlmnodeError
from llmnode.models.sources.checkpoint import ADAPTER_WEIGHTS_FILE
from llmnode.node import Node
from llmnode.node.cli import main
from llmnode.petals import AutoDistributedModelForCausalLM
from process.test_client_adapters import FURTHEST, error
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
SERVED = {"worker": "thread", "threads": 1, "kv_tokens": 5000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in `model`, and two adapters for it in `pirate` and `butler`."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("served")
    make_model("llama", tied=False).save_pretrained(path / "model")
    for seed, name in enumerate(("pirate", "butler")):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4 + seed, target_modules=["q_proj", "down_proj"])
        made = peft.get_peft_model(make_model("llama", tied=False), config)
        generator = torch.Generator().manual_seed(seed)
        for path_of, parameter in made.named_parameters():
            if "lora_" in path_of:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        made.save_pretrained(path / name)
    return path


@pytest.fixture(scope="module")
def peers(folder: Path) -> Iterator[list[str]]:
    """Two servers of both adapters, and one of the whole model that has only one of them, by another name."""
    both = [str(folder / "pirate"), str(folder / "butler")]
    model = str(folder / "model")
    with ExitStack() as stack:
        first = stack.enter_context(Node(model, blocks="0:2", adapters=both, **SERVED))
        known = first.addresses
        stack.enter_context(Node(model, blocks=f"2:{BLOCKS}", adapters=both, peers=known, **SERVED))
        named = [f"steward={folder / 'butler'}"]
        stack.enter_context(Node(model, blocks=f"0:{BLOCKS}", adapters=named, peers=known, **SERVED))
        yield list(known)


def expected(folder: Path, name: str) -> torch.Tensor:
    whole = peft.PeftModel.from_pretrained(make_model("llama", tied=False), folder / name)
    with torch.no_grad():
        logits: torch.Tensor = whole(IDS).logits
    return logits


def test_a_client_names_an_adapter_and_gets_what_peft_gives(folder: Path, peers: list[str]) -> None:
    digests = set()
    for adapter, name in (
        ("pirate", "pirate"),
        ("steward", "butler"),
        (str(folder / "pirate"), "pirate"),
        (str(folder / "butler"), "butler"),
    ):
        with llmnode.connect(str(folder / "model"), peers=peers, adapter=adapter) as model:
            with torch.no_grad():
                assert error(model(IDS).logits, expected(folder, name)) < 3 * FURTHEST, adapter
                cached = model(IDS[:, :3], use_cache=True)
                last = model(IDS[:, 3:], cache=cached.cache).logits
            assert error(last, expected(folder, name)[:, 3:]) < 3 * FURTHEST, adapter
            embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
            model(inputs_embeds=embedded).logits.sum().backward()
            assert embedded.grad is not None
            whole = peft.PeftModel.from_pretrained(make_model("llama", tied=False), folder / name)
            theirs = whole.get_input_embeddings()(IDS).detach().requires_grad_()
            whole(inputs_embeds=theirs).logits.sum().backward()
            assert error(embedded.grad, theirs.grad) < 10 * FURTHEST, adapter
            digests.add(model.info.adapter)
    assert len(digests) == 3  # two that servers announce, and None where the client has the adapter
    with AutoDistributedModelForCausalLM.from_pretrained(
        str(folder / "model"), initial_peers=peers, active_adapter="butler"
    ) as model:
        assert error(model(IDS).logits, expected(folder, "butler")) < 3 * FURTHEST


def test_a_session_with_an_announced_adapter_is_saved_and_goes_on(
    folder: Path, peers: list[str], tmp_path: Path
) -> None:
    with llmnode.connect(str(folder / "model"), peers=peers, adapter="pirate") as model:
        cache = model.open_cache(max_length=16)
        model(IDS[:1, :3], cache=cache)
        cache.export(tmp_path / "kept", IDS[0, :3].tolist())
    with llmnode.resume(tmp_path / "kept", str(folder / "model"), peers=peers) as model, torch.no_grad():
        again = model(IDS[:1, 3:], cache=model.resumed).logits
        assert error(again, expected(folder, "pirate")[:1, 3:]) < 3 * FURTHEST


def test_a_second_adapter_and_an_unknown_one_are_refused(folder: Path, peers: list[str]) -> None:
    with pytest.raises(ConfigError, match="there are butler, pirate, steward"):
        llmnode.connect(str(folder / "model"), peers=peers, adapter="cook")
    for adapter in ("pirate", str(folder / "pirate")):
        with llmnode.connect(str(folder / "model"), peers=peers, adapter=adapter) as model:
            made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
            with pytest.raises(ConfigError, match="one adapter"):
                made(IDS)
            with made.disable_adapter(), torch.no_grad():
                assert error(made(IDS).logits, expected(folder, "pirate")) < 3 * FURTHEST


def test_commands_list_and_use_them(folder: Path, peers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "--peers", *peers, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["adapters"]
    assert {(each["name"], each["rank"], len(each["announced_by"])) for each in found} == {
        ("pirate", 4, 2),
        ("butler", 5, 2),
        ("steward", 5, 1),
    }
    assert all(each["base"] == "model" and each["holes"] == [] for each in found)
    assert len({each["digest"] for each in found}) == 2
    assert main(["adapters", "--peers", *peers]) == 0
    table = capsys.readouterr().out
    assert "pirate" in table
    assert "The servers claim this" in table


def test_a_bad_adapter_ends_a_server_at_its_start_with_the_fix(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in (folder / "pirate").iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    tensors = load_file(bad / ADAPTER_WEIGHTS_FILE)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, bad / ADAPTER_WEIGHTS_FILE)

    def refused(*adapters: str) -> LlmnodeError:
        with pytest.raises(LlmnodeError) as caught:
            Node(str(folder / "model"), blocks="0:2", adapters=adapters, **SERVED).__enter__()
        return caught.value

    wrong_shape = refused(str(bad))
    assert isinstance(wrong_shape, AdapterError)
    assert "the adapter bad: self_attn.q_proj: shapes" in str(wrong_shape)
    assert "Leave it out of --adapters" in str(wrong_shape)
    assert "one of that name or content already" in str(refused(str(folder / "pirate"), f"x={folder / 'pirate'}"))
    assert "9 are named, of at most 8" in str(refused(*[str(folder / "pirate")] * 9))
    os.truncate(bad / ADAPTER_WEIGHTS_FILE, 10 << 30)
    assert "use one of lower rank" in str(refused(str(bad)))


def test_what_is_generated_has_the_adapter(folder: Path, peers: list[str]) -> None:
    whole: Any = peft.PeftModel.from_pretrained(make_model("llama", tied=False), folder / "pirate")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with llmnode.connect(str(folder / "model"), peers=peers, adapter="pirate") as model:
        assert model.generate(IDS, **options).equal(whole.generate(input_ids=IDS, **options))
