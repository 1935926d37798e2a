"""TRL's SFTTrainer over remote blocks: the losses of one process. TRL is large, so only the daily run installs it."""

from __future__ import annotations

import copy
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

import llmnode

trl = pytest.importorskip("trl", reason="TRL is not installed: `pip install trl`, as .ci/daily does")
datasets = pytest.importorskip("datasets")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 3
FURTHEST = 1e-5
TEXTS = [{"text": topics[name][:400]} for name in ("assert", "break", "del", "global", "import", "pass")]


def _train(model: Any, tokenizer: Any, folder: Path, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """The trainer, and each loss as it is: the trainer's own log has four places."""
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        max_length=48,
        learning_rate=0.01,
        logging_steps=1,
        **options,
    )
    torch.manual_seed(0)
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(TEXTS),
        eval_dataset=datasets.Dataset.from_list(TEXTS[:2]),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"]),
    )
    generator = torch.Generator().manual_seed(1)
    for _, each in sorted((name, each) for name, each in trainer.model.named_parameters() if "lora_" in name):
        each.data = 0.02 * torch.randn(each.shape, generator=generator)
    losses: list[torch.Tensor] = []
    compute = trainer.compute_loss

    def recorded(*args: Any, **more: Any) -> Any:
        found = compute(*args, **more)
        losses.append((found[0] if isinstance(found, tuple) else found).detach())
        return found

    trainer.compute_loss = recorded
    trainer.train()
    trainer.evaluate()
    return trainer, losses


@pytest.fixture
def model(peers: list[str]) -> Iterator[Any]:
    with llmnode.connect(peers=peers) as connected:
        yield connected


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_its_losses_are_those_of_one_process(
    loss_type: str, model: Any, transformers_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    whole = copy.deepcopy(transformers_model)
    theirs, their_losses = _train(whole, tokenizer, tmp_path / "theirs", loss_type=loss_type)
    ours, losses = _train(model, tokenizer, tmp_path / "ours", loss_type=loss_type)
    assert len(losses) == len(their_losses) > STEPS
    for one, other in zip(losses, their_losses, strict=True):
        assert abs(one - other) < FURTHEST * other
    assert losses[STEPS] != losses[0]
    prompt = tokenizer("The", return_tensors="pt")
    texts = [each.model.generate(**prompt, max_new_tokens=4, do_sample=False) for each in (theirs, ours)]
    assert texts[0].tolist() == texts[1].tolist()
    ours.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
