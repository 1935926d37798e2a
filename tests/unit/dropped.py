"""Dropout of an adapter's inputs in plain numbers, the slow and obvious twin of `compute/dropout.py`."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.operations import Dropout

MOST = 2**64


def splitmix64(seed: int, number: int) -> int:
    """The output of this number, from 1 on."""
    mixed = (seed + number * 0x9E3779B97F4A7C15) % MOST
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % MOST
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % MOST
    return mixed ^ (mixed >> 31)


def dropped(seed: int, layer: str, length: int, inputs: int, probability: float) -> torch.Tensor:
    """Returns (length, inputs), bool: whether an input of a layer is dropped in a sequence."""
    of_layer = int.from_bytes(hashlib.blake2b(layer.encode(), digest_size=8).digest(), "little")
    rows = []
    for position in range(length):
        own = splitmix64(seed, position + 1) ^ of_layer
        packed = b"".join(splitmix64(own, 1 + word).to_bytes(8, "little") for word in range((inputs + 3) // 4))
        lanes = struct.unpack(f"<{len(packed) // 2}h", packed)
        rows.append([lane + 2**15 < round(probability * 2**16) for lane in lanes])
    return torch.tensor(rows)[:, :inputs]


class ByHand(torch.nn.Module):
    """Stands for PEFT's dropout in a layer of a model in one process, for sequences with the dropout `asked`."""

    def __init__(self, layer: str, asked: Callable[[], Dropout]) -> None:
        super().__init__()
        self._layer, self._asked = layer, asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (sequences, tokens, inputs)."""
        if not (asked := self._asked()):
            return x
        masks = [dropped(seed, self._layer, *x.shape[1:], asked.probability) for seed in asked.seeds]
        return x.masked_fill(torch.stack(masks), 0.0) / (1 - asked.probability)


def drop_by_hand(model: Any, blocks: str, asked: Callable[[], Dropout]) -> None:
    """Have all adapters of PEFT in a model drop what is `asked`. The names of its blocks begin with `blocks`."""
    for path, module in model.base_model.model.named_modules():
        for name in getattr(module, "lora_dropout", {}):
            module.lora_dropout[name] = ByHand(path.removeprefix(blocks), asked)
