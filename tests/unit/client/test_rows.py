"""How many rows of a batch are under way at a time."""

from __future__ import annotations

import torch

from llmnode.client.rows import BYTES_PER_HOP, POSITIONS_PER_HOP, _under_way


def test_so_many_rows_are_under_way_that_each_hop_has_one_and_another_waits() -> None:
    rows = 64 * [torch.zeros(128, 576)]
    assert _under_way(rows, 3) == 3 * POSITIONS_PER_HOP // 128 == 24
    assert _under_way([*rows, torch.zeros(8192, 576)], 3) == 1


def test_rows_of_a_wide_model_do_not_fill_the_memory_of_a_hop() -> None:
    wide = torch.zeros(1, 14336).expand(128, 14336)
    rows = _under_way(64 * [wide], 12)
    assert 12 * BYTES_PER_HOP // 2 < rows * wide.shape[0] * wide.shape[1] * 4 <= 12 * BYTES_PER_HOP
    assert rows >= 2 * 12, "one that is computed, and one that waits"
    assert _under_way([], 3) == _under_way([torch.zeros(1, 14336).expand(4096, 14336)], 1) == 1
