"""The numbers that dropout sets to 0, before the matrices of an adapter: they follow from the seeds of sequences alone.

Whole numbers give the same bits on every machine and device, however a pass is cut, and whatever else is computed. So
a backward, which computes its blocks again, drops what its forward did, and so does another server.

The bits are outputs of SplitMix64 (Steele, Lea and Flood 2014, *Fast splittable pseudorandom number generators*; in
the form of Vigna's `splitmix64.c`). Its output number n of a seed is `mix(seed + n * GAMMA)`. The seed of a sequence
gives each position a number, in this way. This number, exclusive or that of the layer, is the seed of the position's
bits in the layer: each output has 16 bits for each of 4 inputs. These are a signed number, and small ones are dropped.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Dropout

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # torch has signed numbers, whose products are the same bits
_FACTORS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
_LANES = 4
"""Inputs for which one number of 64 bits is enough."""
_STEPS = 2**16
"""A probability is rounded to a multiple of one by this."""
_TOGETHER = 1 << 16
"""The most numbers that are made at once: they stay in a processor's cache."""


class DroppedRows:
    """The dropout of rows of a forward, which are whole sequences, end to end."""

    def __init__(self, dropout: Dropout, lengths: Sequence[int], device: torch.device) -> None:
        self.scale = 1 / (1 - dropout.probability)
        """The numbers that are kept are multiplied by it, as torch's Dropout does."""
        self._least = min(round(_STEPS * dropout.probability), _STEPS - 1) - _STEPS // 2
        sequences = zip(dropout.seeds, lengths, strict=True)
        self._numbers = torch.cat([_mixed(seed + _numbers(length, device)) for seed, length in sequences])  # (rows,)

    def kept(self, layer: str, inputs: int) -> torch.Tensor:
        """(rows, inputs), int8: 1 for inputs of the layer that are kept, or 0. `layer` is its name in the whole model.

        It is not bool, since torch takes ten times longer for products with that.
        """
        seeds = (self._numbers ^ _number_of(layer))[:, None]
        more = _numbers(-(-inputs // _LANES), seeds.device)
        found = torch.empty(len(seeds), len(more) * _LANES, dtype=torch.bool, device=seeds.device)
        together = max(1, _TOGETHER // len(more))
        for some, own in zip(found.split(together), seeds.split(together), strict=True):
            some.copy_(_mixed(own + more).view(torch.int16).ge_(self._least))  # in place torch compares fastest
        return found[:, :inputs].view(torch.int8)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, device=device) * _GAMMA


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Changes `numbers`."""
    shifted = torch.empty_like(numbers)
    for shift, factor in _FACTORS:
        _xor_shifted(numbers, shift, shifted).mul_(factor)
    return _xor_shifted(numbers, 31, shifted)


def _xor_shifted(numbers: torch.Tensor, by: int, shifted: torch.Tensor) -> torch.Tensor:
    """Changes `numbers`, and `shifted`, which is of the same size."""
    torch.bitwise_right_shift(numbers, by, out=shifted)
    return numbers.bitwise_xor_(shifted.bitwise_and_((1 << 64 - by) - 1))  # the sign comes in from the left


@lru_cache(1 << 14)
def _number_of(layer: str) -> int:
    return int.from_bytes(hashlib.blake2b(layer.encode(), digest_size=8).digest(), "little", signed=True)
