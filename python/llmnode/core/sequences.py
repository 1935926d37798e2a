"""Sequences that lie end to end: which go together, and where their rows are."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer


MICROBATCHES = 8
"""A batch is cut into this number of parts, if they are not too small: of N servers in a row, each is then busy in 8 of
7 + N turns."""
LEAST_POSITIONS = 256
"""A server computes a part of fewer positions hardly faster."""


def microbatch_positions(positions: int, row_bytes: int, adapter_bytes: int) -> int:
    """How many of the `positions` of a batch, of `row_bytes` each, go through servers together.

    Each part has an answer with all gradients of the adapter, `adapter_bytes` from all servers together. They are at
    most twice the bytes of its hidden states.
    """
    return max(LEAST_POSITIONS, positions // MICROBATCHES, adapter_bytes // (2 * row_bytes))


def grouped(lengths: Sequence[int], most_positions: int, most_sequences: int | None = None) -> list[tuple[int, ...]]:
    """The lengths, in order, in groups that go together. A longer sequence is a group of its own."""
    groups: list[list[int]] = [[]]
    for length in lengths:
        is_full = sum(groups[-1]) + length > most_positions or len(groups[-1]) == most_sequences
        if groups[-1] and is_full:
            groups.append([])
        groups[-1].append(length)
    return [tuple(group) for group in groups]


def split_rows(rows: Buffer, positions: Sequence[int]) -> list[memoryview]:
    """`rows`, one for each position, cut into parts of these numbers of positions. Copies nothing."""
    view = memoryview(rows).cast("B")
    row_bytes = len(view) // sum(positions)
    edges = accumulate((row_bytes * each for each in positions), initial=0)
    return [view[start:end] for start, end in pairwise(edges)]
