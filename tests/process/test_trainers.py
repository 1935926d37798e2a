"""Trainers that people know: transformers' own over remote blocks does what it does over a whole model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import llmnode
from llmnode.errors import ConfigError
from process.pairs import open_pair, with_head
from process.test_training import FURTHEST, _error
from reference.small import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from process.pairs import Pair

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with open_pair("llama", tmp_path_factory.mktemp("model")) as opened:
        yield opened


def _examples() -> list[dict[str, Any]]:
    """Texts of unequal lengths; the label says which half of the vocabulary their tokens are of."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (16,), generator=generator).tolist()
    labels = torch.arange(16) % 2
    ids = [
        torch.randint(1, VOCABULARY // 2, (length,), generator=generator) + label * (VOCABULARY // 2)
        for length, label in zip(lengths, labels, strict=True)
    ]
    return [{"input_ids": each, "labels": label} for each, label in zip(ids, labels, strict=True)]


def _collated(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([each["input_ids"] for each in examples], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each["input_ids"]) for each in examples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([each["labels"] for each in examples])}


def _trainer(model: Any, folder: Path, **changes: Any) -> Trainer:
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_steps": 2,
        **changes,
    }
    arguments = TrainingArguments(**options)
    return Trainer(model=model, args=arguments, train_dataset=_examples(), data_collator=_collated)


def _losses(trainer: Trainer) -> torch.Tensor:
    return torch.tensor([each["loss"] for each in trainer.state.log_history if "loss" in each])


def test_a_trainer_of_transformers_learns_the_same_and_goes_on_from_what_was_trained_alone(
    pair: Pair, tmp_path: Path
) -> None:
    theirs, ours = with_head(pair, "sequence-classification", num_labels=2)
    start = copy.deepcopy(ours.score.state_dict())
    trainers = []
    for name, model in (("theirs", theirs), ("ours", ours)):
        trainers.append(_trainer(model, tmp_path / name))
        trainers[-1].train()
    losses = [_losses(trainer) for trainer in trainers]
    assert len(losses[0]) == STEPS
    assert _error(losses[1], losses[0]) < 1e-3  # they are logged with four places
    assert _error(ours.score.weight, theirs.score.weight) < 10 * FURTHEST
    saved = load_file(tmp_path / "ours" / "checkpoint-2" / "model.safetensors")
    assert list(saved) == ["score.weight"]
    trained = ours.score.weight.detach().clone()
    ours.score.load_state_dict(start)
    again = _trainer(ours, tmp_path / "ours")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert _error(ours.score.weight, trained) < FURTHEST


def test_a_trainer_saves_the_adapter_of_peft_alone(pair: Pair, tmp_path: Path) -> None:
    _, ours = with_head(pair, "sequence-classification", num_labels=2)
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    trainer = _trainer(
        peft.get_peft_model(ours, config), tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8
    )
    trainer.train()
    saved = load_file(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert sorted(name.rpartition(".")[2] for name in saved) == ["prompt_embeddings", "weight"]
    losses = _losses(trainer)
    assert losses.isfinite().all()
    assert losses[-1] < losses[0]


def test_what_add_adapter_of_transformers_adds_is_saved_as_peft_reads_it(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers 5.24 asks for a PEFT that is not published yet.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    ids = torch.arange(1, 8)[None]
    with llmnode.connect(pair.folder, peers=pair.peers) as model:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            ours = model(ids).logits
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(pair.alone), tmp_path)
    with torch.no_grad():
        assert _error(ours, theirs(ids).logits) < FURTHEST
        assert _error(ours, pair.alone(ids).logits) > 0.01


def test_a_trainer_learns_prompts_before_each_block_and_goes_on_from_them(pair: Pair, tmp_path: Path) -> None:
    _, ours = with_head(pair, "sequence-classification", num_labels=2)
    ours.tune_prompts("deep_ptune", 3)
    trained = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    names = {"score", "prompt_embeddings", "intermediate_prompt_embeddings"}
    assert {name.split(".")[-2] for name in trained} == names
    start = {name: each.detach().clone() for name, each in trained.items()}
    options = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "learning_rate": 0.01}
    trainer = _trainer(ours, tmp_path, **options)
    trainer.train()
    losses = _losses(trainer)
    assert losses[-1] < losses[0]
    learned = load_file(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors")
    assert learned.keys() == trained.keys()
    for name, each in learned.items():
        assert torch.equal(each, trained[name]), name
        assert _error(each, start[name]) > 0.01, name
    ours.load_state_dict(start, strict=False)
    _trainer(ours, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, each in learned.items():
        assert _error(trained[name], each) < FURTHEST, name


def test_a_model_in_which_nothing_is_trained_has_nothing_to_save(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing here is trained"):
        pair.served.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not here"):
        pair.served.push_to_hub("name")


def _by_hand(model: Any, accelerator: Accelerator | None) -> torch.Tensor:
    """The head's weights after a loop of one's own, whose gradients are summed over two batches."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for first in range(0, 8, 2):
        batch = _collated(_examples()[first : first + 2])
        if accelerator is None:
            (model(**batch).loss / 2).backward()
            if first % 4 == 2:
                optimizer.step()
                optimizer.zero_grad()
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    trained: torch.Tensor = getattr(model, "module", model).score.weight.detach().clone()
    return trained


def test_accelerate_and_a_loop_by_hand_learn_the_same(pair: Pair) -> None:
    theirs, ours = with_head(pair, "sequence-classification", num_labels=2)
    start = copy.deepcopy(ours.score.state_dict())
    expected = _by_hand(theirs, None)
    assert _error(_by_hand(ours, None), expected) < 10 * FURTHEST
    ours.score.load_state_dict(start)
    found = _by_hand(ours, Accelerator(cpu=True, gradient_accumulation_steps=2))
    assert _error(found, expected) < 10 * FURTHEST
    assert _error(found, start["weight"]) > 0.01


def test_autocast_is_of_the_clients_part_alone(pair: Pair) -> None:
    """Servers compute in their own precision. The head is in bfloat16, and its loss differs by the error of that."""
    _, ours = with_head(pair, "sequence-classification", num_labels=2)
    batch = _collated(_examples()[:4])
    exact = ours(**batch).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours(**batch)
    assert output.logits.dtype == torch.bfloat16
    assert 0 < _error(output.loss, exact) < 0.02
    output.loss.backward()
    assert ours.score.weight.grad.isfinite().all()


def _with_lora(pair: Pair) -> Any:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(pair.served), config)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("way", ["autocast", "a scaler", "a trainer"])
def test_adapters_learn_in_mixed_precision_as_in_fp32(pair: Pair, way: str, tmp_path: Path) -> None:
    """Their matrices, and what servers compute, stay in fp32. bfloat16 has an error of 0.004."""
    model = _with_lora(pair)
    ids = torch.arange(1, 13).reshape(2, 6)
    batch = {"input_ids": ids, "labels": ids}
    if way == "a trainer":
        texts = [{"input_ids": each, "labels": each} for each in ids]
        losses = []
        for half in (False, True):
            trainer = _trainer(_with_lora(pair), tmp_path, bf16=half, save_strategy="no")
            trainer.train_dataset = texts
            trainer.train()
            losses.append(_losses(trainer))
        assert losses[1][-1] < losses[1][0]
        assert 0 < _error(losses[1], losses[0]) < 0.02
        return
    exact = model(**batch).loss
    exact.backward()
    expected = _gradients(model)
    assert len(expected) == 2 * 2 * len(pair.served.remote_blocks)
    model.zero_grad()
    if way == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**batch)
        assert output.logits.dtype == torch.bfloat16
        assert 0 < _error(output.loss, exact) < 0.02
        output.loss.backward()
        for name, gradient in _gradients(model).items():
            assert gradient.dtype == torch.float32
            assert 0 < _error(gradient, expected[name]) < 0.1, name
        return
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000, backoff_factor=2.0**-120)
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    for scale in (2.0**127, 2.0**7):
        assert scaler.get_scale() == scale
        for name, each in before.items():  # a step whose gradients overflow is left out
            assert torch.equal(model.get_parameter(name), each)
        optimizer.zero_grad()
        scaler.scale(model(**batch).loss).backward()
        scaler.unscale_(optimizer)
        found = _gradients(model)
        scaler.step(optimizer)
        scaler.update()
    for name, gradient in found.items():
        assert _error(gradient, expected[name]) < 10 * FURTHEST, name
        assert not torch.equal(model.get_parameter(name), before[name])


@pytest.mark.parametrize("kind", ["adapter", "head"])
def test_data_parallel_processes_share_what_is_here_alone(pair: Pair, kind: str) -> None:
    """One process is enough for torch to put the parameters of a model in order, as it does for several."""
    if kind == "adapter":
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        model: Any = peft.get_peft_model(copy.deepcopy(pair.served), config)
        ids = torch.arange(1, 7)[None]
        batch = {"input_ids": ids, "labels": ids}
    else:
        _, model = with_head(pair, "sequence-classification", num_labels=2)
        batch = _collated(_examples()[:2])
    model(**batch).loss.backward()
    expected = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        parallel(**batch).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    assert expected
    for ours, theirs in zip(found, expected, strict=True):
        assert _error(ours, theirs) < FURTHEST
