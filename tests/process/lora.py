"""LoRA of PEFT in a small model of any family: the whole one, or one whose blocks are with servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft
import torch

from reference.peft_batch import TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping

ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 4, "lora_alpha": 6},
    "two": {"r": 3, "lora_alpha": 5, "use_rslora": True, "layers_to_transform": [0, 1, 3]},
}
"""Their ranks, scales and blocks. Their layers differ too: see `TARGETS`."""


def config_of(model: Any, name: str, **changes: Any) -> peft.LoraConfig:  # Any: as transformers types its models
    """The configuration of one of the `ADAPTERS` for a model of this family, with `changes`."""
    targets = TARGETS.get(model.config.model_type, TARGETS["falcon-new"])
    options = {"target_modules": targets[list(ADAPTERS).index(name)], "task_type": "CAUSAL_LM", **ADAPTERS[name]}
    return peft.LoraConfig(**{**options, **changes})


def draw(model: Any, name: str, seed: int, size: float = 0.1) -> None:
    """Give the matrices of an adapter other numbers of about this size, the same ones in each model."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in sorted(model.named_parameters()):
        if "lora_" in path and f".{name}." in path:
            parameter.data = size * torch.randn(parameter.shape, generator=generator)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Those of all that is trained, by name."""
    return {path: each.grad for path, each in model.named_parameters() if each.requires_grad}


def learn_once(model: Any, name: str, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss of a batch, and the gradients of an adapter that the model has meanwhile."""
    adapted = peft.get_peft_model(model, config_of(model, name))
    try:
        draw(adapted, "default", len(name) + ord(name[0]))
        loss = adapted(**batch).loss
        loss.backward()
        return {"loss": loss.detach(), **gradients(adapted)}
    finally:
        adapted.unload()
