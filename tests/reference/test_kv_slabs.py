"""KV takes memory as positions are written, and gives it back when its session ends."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from llmnode.compute.attention import SequenceKV
from llmnode.compute.heap import give_back

HEADS, HEAD_DIM, LAYERS = 8, 64, 2
CAPACITY = 8192
POSITION_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4
SLACK_BYTES = 2 << 20
"""What else the process may do meanwhile."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory otherwise")


def own_bytes() -> int:
    """Of this process alone."""
    return int(psutil.Process().memory_full_info().uss)


def write(kv: SequenceKV, start: int, length: int) -> None:
    states = torch.ones(1, HEADS, length, HEAD_DIM)
    for layer in range(LAYERS):
        kv.extend(layer, start, states, states)


def test_what_is_reserved_and_not_used_takes_no_memory_and_what_was_used_is_given_back() -> None:
    write(SequenceKV(1), 0, 1)  # what a first call needs for itself
    give_back()
    before = own_bytes()
    kv = SequenceKV(CAPACITY)
    write(kv, 0, 20)
    pages_of_heads = 3 * 4096 * LAYERS * 2 * HEADS  # the 20 of a head are in two pages, or in three
    assert own_bytes() - before < pages_of_heads + SLACK_BYTES
    for start in range(20, CAPACITY - 500, 500):
        write(kv, start, 500)
    assert own_bytes() - before > 0.9 * CAPACITY * POSITION_BYTES
    del kv
    give_back()
    assert own_bytes() - before < SLACK_BYTES
