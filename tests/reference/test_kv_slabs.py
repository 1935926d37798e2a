"""KV takes memory as positions are written, and gives it back when its session ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from llmnode.compute.kv import KVForm, SequenceKV
from llmnode.core.model import KV_DTYPES, SAME
from llmnode.machine.malloc import give_back

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS, HEAD_DIM, LAYERS = 8, 64, 2
CAPACITY = 8192
POSITION_BYTES = {SAME: LAYERS * 2 * HEADS * HEAD_DIM * 4, "int8": LAYERS * 2 * HEADS * (HEAD_DIM + 4)}
SLACK_BYTES = 2 << 20
"""Memory for other allocations of the process meanwhile."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory otherwise")


def own_bytes() -> int:
    """Memory of this process alone."""
    return int(psutil.Process().memory_full_info().uss)


def write(kv: SequenceKV, start: int, length: int) -> None:
    states = torch.ones(1, HEADS, length, HEAD_DIM)
    for layer in range(LAYERS):
        kv.extend(layer, start, states, states)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_reserved_and_not_used_takes_no_memory_and_what_was_used_is_given_back(dtype: str) -> None:
    write(SequenceKV(1, KVForm(dtype)), 0, 1)  # what a first call needs for itself
    give_back()
    before = own_bytes()
    kv = SequenceKV(CAPACITY, KVForm(dtype))
    write(kv, 0, 20)
    slabs = 1 if dtype == SAME else 2  # codes and scales
    pages_of_heads = 3 * 4096 * LAYERS * 2 * HEADS * slabs  # the 20 of a head are in two pages, or in three
    assert own_bytes() - before < pages_of_heads + SLACK_BYTES
    for start in range(20, CAPACITY - 500, 500):
        write(kv, start, 500)
    give_back()  # what rounding worked with
    assert 0.9 < (own_bytes() - before) / (CAPACITY * POSITION_BYTES[dtype]) < 1.1
    del kv
    give_back()
    assert own_bytes() - before < SLACK_BYTES


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_nothing_is_kept_of_what_a_long_first_prefill_has_computed(dtype: str) -> None:
    write(SequenceKV(1, KVForm(dtype)), 0, 1)
    give_back()
    before = own_bytes()
    kv = SequenceKV(CAPACITY, KVForm(dtype))
    write(kv, 0, CAPACITY)
    give_back()
    assert own_bytes() - before < 1.05 * CAPACITY * POSITION_BYTES[dtype] + SLACK_BYTES
    assert kv.capacity == CAPACITY


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_no_huge_page_backs_a_slab_wherever_the_system_has_them(dtype: str) -> None:
    kv = SequenceKV(CAPACITY, KVForm(dtype))
    slabs = [slab for pair in kv.slabs(range(LAYERS), torch.ones(1, HEADS, 1, HEAD_DIM)) for slab in pair]
    flags = dict(flags_of_mappings())
    for slab in slabs:
        start = max(start for start in flags if start <= slab.data_ptr())
        assert "nh" in flags[start]


def flags_of_mappings() -> Iterator[tuple[int, list[str]]]:
    """The start and the VmFlags (proc(5)) of each range of this process' memory."""
    start = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if name == "VmFlags:":
            yield start, rest
        elif not name.endswith(":"):
            start = int(name.split("-")[0], 16)
