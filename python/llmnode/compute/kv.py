"""Keys and values of one sequence: in the dtype of the blocks or in 8 bits, beside the blocks or on another device.

A read returns the stored values, even for new positions. So it does not depend on how a sequence was cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from llmnode.core.model import SAME
from llmnode.machine.malloc import reserve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

KVPair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, (1, heads, positions, head_dim) each."""
_LARGEST = 127
"""The code of the largest number of a head, of either sign."""


@dataclass(frozen=True, slots=True)
class KVForm:
    """`dtype` is one of `core.model.KV_DTYPES`. `device` is None for the device of the blocks."""

    dtype: str = SAME
    device: torch.device | None = None


class KV(Protocol):
    """Keys and values of one sequence, per block: memory for `capacity` positions, of which `length` are filled."""

    length: int

    @property
    def capacity(self) -> int: ...

    def extend(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor, seen_from: int = 0) -> KVPair:
        """Write (1, heads, new, head_dim) at position `start`; returned are [seen_from, start + new) as they are kept.

        They are of the dtype and on the device of `keys`.
        """

    def resize(self, capacity: int) -> None:
        """Have memory for this many positions, no fewer than were ever written."""

    def copy(self, other: Self, start: int, end: int) -> None:
        """Have the positions [start, end) be those of `other`, in all blocks, and be the last ones."""


@dataclass(slots=True)
class SequenceKV:
    """The `KV` protocol in slabs. It has memory for `capacity` positions, and never for more than `most`.

    A slab beside blocks on a CPU is reserved address space for `most` positions; the system backs it with memory as
    positions are written. Elsewhere it has `capacity` positions, and another slab replaces it. A session for 8192
    positions that had used 20 took twice their size, since each head has pages of its own (`tests/bench/run memory`).
    Smaller pages of ours would save only that, and attention would have to gather them at every step.
    """

    capacity: int
    form: KVForm = KVForm()
    length: int = 0
    most: int = 0
    """The most positions that it may ever have memory for; `capacity` if that is more."""
    _blocks: dict[int, _Plain | _Rounded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.most = max(self.most, self.capacity)

    def resize(self, capacity: int) -> None:
        for block in self._blocks.values():
            for slab in block.slabs:  # one at a time is there twice
                slab.resize(self._slab_positions(block.like, capacity), self.length)
        self.capacity = capacity

    def extend(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor, seen_from: int = 0) -> KVPair:
        block = self._block(layer, keys)
        block.write(start, keys, values)
        return block.read(seen_from, start + keys.shape[2])

    def copy(self, other: SequenceKV, start: int, end: int) -> None:
        pairs = [(self._block(layer, block.like), block) for layer, block in other._blocks.items()]  # all before any
        for own, theirs in pairs:
            for slab, filled in zip(own.slabs, theirs.slabs, strict=True):
                slab.states[:, :, start:end] = filled.states[:, :, start:end]
        self.length = end

    def slabs(self, layers: Iterable[int], like: torch.Tensor) -> list[KVPair]:
        """The slabs of each layer, to be written and read in place: keys and values, or the codes and scales of both.

        `like` has the shape of keys and values, with any number of positions.
        """
        pairs = (self._block(layer, like).slabs for layer in layers)
        return [(first.states, second.states) for first, second in pairs]

    def _block(self, layer: int, like: torch.Tensor) -> _Plain | _Rounded:
        block = self._blocks.get(layer)
        if block is None:
            positions = self._slab_positions(like, self.capacity)
            block = self._blocks[layer] = BLOCKS[self.form.dtype](like, positions, self.form.device)
        return block

    def _slab_positions(self, like: torch.Tensor, capacity: int) -> int:
        """The positions of a slab, where the sequence has KV for `capacity`."""
        is_lazy = self.form.device is None and like.device.type == "cpu"
        return self.most if is_lazy else capacity


class _Plain:
    """The KV of one block, in the dtype of `like`, (1, heads, any, head_dim) where the blocks are."""

    def __init__(self, like: torch.Tensor, capacity: int, device: torch.device | None) -> None:
        self.like = _none_of(like)
        shape = (1, like.shape[1], capacity, like.shape[3])
        self.slabs = _slab(shape, like.dtype, like.device, device), _slab(shape, like.dtype, like.device, device)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.slabs[0].write(start, keys)
        self.slabs[1].write(start, values)

    def read(self, first: int, end: int) -> KVPair:
        return self.slabs[0].read(first, end), self.slabs[1].read(first, end)


class _Rounded:
    """The KV of one block in 8 bits: each position and head has a scale, by which its largest number is 127.

    So a number is off by 1/254 of the largest at most, whatever other positions and heads have. The scale is fp32: of
    fp16's two bytes less in 68, large keys would be infinite, small ones coarser.
    """

    def __init__(self, like: torch.Tensor, capacity: int, device: torch.device | None) -> None:
        self.like = _none_of(like)
        shape = (2, like.shape[1], capacity)  # keys and values
        self.slabs = (
            _slab((*shape, like.shape[3]), torch.int8, like.device, device),
            _slab((*shape, 1), torch.float32, like.device, device),
        )

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        states = torch.cat((keys, values)).float()
        # Never 0, as the scale of nothing but zeros would be.
        scales = (states.abs().amax(3, keepdim=True) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        self.slabs[0].write(start, (states / scales).round_().to(torch.int8))
        self.slabs[1].write(start, scales)

    def read(self, first: int, end: int) -> KVPair:
        codes, scales = (slab.read(first, end) for slab in self.slabs)
        states = codes.float().mul_(scales).to(self.like.dtype)
        return states[:1], states[1:]


BLOCKS: Mapping[str, type[_Plain | _Rounded]] = {SAME: _Plain, "int8": _Rounded}
"""The KV of one block, by the names of `core.model.KV_DTYPES`."""


class _Beside:
    """(rows, heads, capacity, width) on the blocks' own device, in that order. A read makes no copy."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        here = device.type == "cpu"
        self.states = reserve(shape, dtype) if here else torch.empty(shape, dtype=dtype, device=device)

    def resize(self, capacity: int, filled: int) -> None:
        """Have memory for `capacity` positions, and keep the first `filled` ones."""
        rows, heads, positions, width = self.states.shape
        if capacity != positions:
            resized = self.states.new_empty((rows, heads, capacity, width))
            resized[:, :, :filled] = self.states[:, :, :filled]
            self.states = resized

    def write(self, start: int, new: torch.Tensor) -> None:
        self.states.narrow(2, start, new.shape[2]).copy_(new)

    def read(self, first: int, end: int) -> torch.Tensor:
        return self.states.narrow(2, first, end - first)


class _Elsewhere:
    """(rows, heads, capacity, width) on another device than the blocks, by position, so that one piece crosses.

    Copies do not wait: all are of one stream, whose end every forward waits for. From a GPU the memory is pinned, else
    they would, and would take longer; so all of it is taken when the first position is written.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, blocks: torch.device, device: torch.device
    ) -> None:
        rows, heads, capacity, width = shape
        pinned = blocks.type == "cuda" and device.type == "cpu"
        self._blocks = blocks
        self._pinned = pinned
        self._positions = torch.empty((capacity, rows, heads, width), dtype=dtype, device=device, pin_memory=pinned)
        self.states = self._positions.permute(1, 2, 0, 3)

    def resize(self, capacity: int, filled: int) -> None:
        """Wait for all copies that are under way, and then do the same as `_Beside.resize`."""
        former = self._positions
        if capacity != len(former):
            if self._pinned:
                torch.cuda.synchronize(self._blocks)
            shape = capacity, *former.shape[1:]
            self._positions = torch.empty(shape, dtype=former.dtype, device=former.device, pin_memory=self._pinned)
            self._positions[:filled] = former[:filled]
            self.states = self._positions.permute(1, 2, 0, 3)

    def write(self, start: int, new: torch.Tensor) -> None:
        positions = new.permute(2, 0, 1, 3).contiguous()
        self._positions.narrow(0, start, len(positions)).copy_(positions, non_blocking=True)

    def read(self, first: int, end: int) -> torch.Tensor:
        positions = self._positions.narrow(0, first, end - first)
        return positions.to(self._blocks, non_blocking=True).permute(1, 2, 0, 3)


def _none_of(like: torch.Tensor) -> torch.Tensor:
    """No positions of its kind, and none of its memory: a view would keep all that a first prefill has computed."""
    return like.new_empty((1, like.shape[1], 0, like.shape[3]))


def _slab(
    shape: tuple[int, int, int, int], dtype: torch.dtype, blocks: torch.device, device: torch.device | None
) -> _Beside | _Elsewhere:
    return _Beside(shape, dtype, blocks) if device is None else _Elsewhere(shape, dtype, blocks, device)
