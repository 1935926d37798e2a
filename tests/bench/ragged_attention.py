"""The time of attention over unequal lengths on a CPU: sequence by sequence (`compute/attention.py`), or all at once.

Ten blocks with the heads of SmolLM2-135M in fp32 run on one thread: only attention and the writes to KV, for eight
decodes, and for seven beside a chunk. All at once means padded to the longest. This way gets every advantage: its KV is
one slab, which a server's is not, and flex_attention has its mask beforehand (Inductor compiles it with a C++
compiler). All ways take turns, and turns at being first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.kit.options import add_repeats
from bench.kit.report import Report, quartiles, ratios
from llmnode.compute.attention import Segment, ragged_attention, segments_of_forward
from llmnode.compute.kv import SequenceKV

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.kit import report
    from bench.kit.options import Options

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCKS = 10
ENDS = (100, 229, 357, 486, 614, 743, 871, 1000)
"""The lengths of the sequences, with their new positions."""
CAPACITY = 1024
CHUNK = 256
ROWS = {"8 decodes": (1,) * 8, f"7 decodes and a chunk of {CHUNK}": (*(1,) * 7, CHUNK)}


@dataclass
class Row:
    """The new positions of all sequences, end to end. All blocks get the same: each (1, heads, tokens, head_dim)."""

    lengths: tuple[int, ...]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __post_init__(self) -> None:
        self.starts = torch.tensor([end - length for end, length in zip(ENDS, self.lengths, strict=True)])
        self.sequence = torch.arange(len(ENDS)).repeat_interleave(torch.tensor(self.lengths))  # by token
        self.place = torch.cat([torch.arange(length) for length in self.lengths])  # of a token in its new positions
        self.position = self.starts[self.sequence] + self.place


def made_row(lengths: tuple[int, ...]) -> Row:
    query, key, value = (torch.randn(1, heads, sum(lengths), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return Row(lengths, query, key, value)


class BySequence:
    def __init__(self, slabs: torch.Tensor) -> None:
        self._kv = [SequenceKV(CAPACITY) for _ in ENDS]
        self._modules = [torch.nn.Identity() for _ in range(BLOCKS)]
        for block, module in enumerate(self._modules):
            module.layer_idx = block  # type: ignore[assignment]  # as transformers has it
            for kv, (keys, values) in zip(self._kv, slabs[block].unbind(1), strict=True):
                kv.extend(block, 0, keys[None], values[None])

    def attend(self, row: Row) -> list[torch.Tensor]:
        """The output of each block: (1, tokens, heads, head_dim)."""
        parts = zip(self._kv, row.starts.tolist(), row.lengths, strict=True)
        token = segments_of_forward.set([Segment(kv, start, length) for kv, start, length in parts])
        try:
            return [ragged_attention(each, row.query, row.key, row.value, None)[0] for each in self._modules]
        finally:
            segments_of_forward.reset(token)


class Padded:
    def __init__(self, slabs: torch.Tensor) -> None:
        self._slabs = slabs.clone()
        self._longest = max(ENDS)

    def attend(self, row: Row) -> list[torch.Tensor]:
        seen = row.starts[:, None] + torch.arange(max(row.lengths))  # last position of each: (sequences, tokens)
        mask = (torch.arange(self._longest) <= seen[:, :, None])[:, None]
        return [self._attend(row, mask, *slabs) for slabs in self._slabs]

    def _attend(self, row: Row, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        write(row, keys, values)
        keys, values = keys[:, :, : self._longest], values[:, :, : self._longest]
        if max(row.lengths) == 1:  # take heads as queries of one head: shared keys and values are read once
            grouped = row.query[0].transpose(0, 1).reshape(len(ENDS), KV_HEADS, -1, HEAD_DIM)
            output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            return output.reshape(1, len(ENDS), HEADS, HEAD_DIM)
        output = scaled_dot_product_attention(padded(row), keys, values, attn_mask=mask, enable_gqa=True)
        return unpadded(row, output)


class Flex:
    def __init__(self, slabs: torch.Tensor) -> None:
        self._slabs = slabs.clone()
        self._attend = torch.compile(flex_attention, dynamic=False)
        self._masks: dict[tuple[int, ...], BlockMask] = {}

    def prepare(self, row: Row) -> None:
        def sees(sequence: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return key <= query + row.starts[sequence]

        self._masks[row.lengths] = create_block_mask(sees, len(ENDS), None, max(row.lengths), CAPACITY, device="cpu")

    def attend(self, row: Row) -> list[torch.Tensor]:
        outputs = []
        for keys, values in self._slabs:
            write(row, keys, values)
            output = self._attend(padded(row), keys, values, block_mask=self._masks[row.lengths], enable_gqa=True)
            outputs.append(unpadded(row, output))
        return outputs


def write(row: Row, keys: torch.Tensor, values: torch.Tensor) -> None:
    keys[row.sequence, :, row.position] = row.key[0].transpose(0, 1)
    values[row.sequence, :, row.position] = row.value[0].transpose(0, 1)


def padded(row: Row) -> torch.Tensor:
    queries = row.query.new_zeros(len(ENDS), max(row.lengths), HEADS, HEAD_DIM)
    queries[row.sequence, row.place] = row.query[0].transpose(0, 1)
    return queries.transpose(1, 2)


def unpadded(row: Row, output: torch.Tensor) -> torch.Tensor:
    return output.transpose(1, 2)[row.sequence, row.place][None]


def took_s(call: Callable[[Row], object], row: Row) -> float:
    began_s = time.perf_counter()
    call(row)
    return time.perf_counter() - began_s


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 40)


@torch.inference_mode()
def run(options: Options) -> Report:
    slabs = torch.randn(BLOCKS, 2, len(ENDS), KV_HEADS, CAPACITY, HEAD_DIM)
    by_sequence, flex = BySequence(slabs), Flex(slabs)
    ways: dict[str, BySequence | Padded | Flex] = {
        "by sequence": by_sequence,
        "padded": Padded(slabs),
        "flex_attention": flex,
    }
    rows: list[report.Row] = []
    notes = {}
    for name, lengths in ROWS.items():
        row = made_row(lengths)
        flex.prepare(row)  # the first call imports much
        masked_s, started_s = took_s(flex.prepare, row), took_s(flex.attend, row)
        notes[f"flex_attention, {name}"] = f"{started_s:.0f} s for the first, {1e3 * masked_s:.0f} ms for its mask"
        expected = by_sequence.attend(row)
        for way in ways.values():
            for ours, theirs in zip(way.attend(row), expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        taken: dict[str, list[float]] = {each: [] for each in ways}
        for number in range(options.repeats):
            first = number % len(ways)
            for way_name in [*ways, *ways][first : first + len(ways)]:
                taken[way_name].append(took_s(ways[way_name].attend, row))
        base = taken.pop("by sequence")
        each: report.Row = {"row": name, "by sequence, ms": quartiles([1e3 * seconds for seconds in base])}
        rows.append(each | {f"{other}, of that": quartiles(ratios(times, base)) for other, times in taken.items()})
    return Report(rows, conditions=notes, legend="median (quartiles)")
