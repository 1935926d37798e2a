"""Batches are cut into parts that keep several servers busy, and that are not smaller than it pays."""

from __future__ import annotations

import pytest

from llmnode.core.sequences import LEAST_POSITIONS, MICROBATCHES, microbatch_positions

ROW_BYTES = 2304


@pytest.mark.parametrize("positions", [8 * LEAST_POSITIONS, 64 * 128, 10**6])
def test_a_large_batch_is_cut_into_parts_for_all_servers(positions: int) -> None:
    assert positions / microbatch_positions(positions, ROW_BYTES, 0) == pytest.approx(MICROBATCHES)


@pytest.mark.parametrize("positions", [1, LEAST_POSITIONS, 8 * LEAST_POSITIONS - 1])
def test_a_small_one_has_no_smaller_parts_than_pays(positions: int) -> None:
    assert microbatch_positions(positions, ROW_BYTES, 0) == LEAST_POSITIONS


@pytest.mark.parametrize("adapter_bytes", [0, 2 << 20, 19 << 20])
def test_the_gradients_of_an_adapter_are_at_most_twice_the_hidden_states_that_they_come_with(
    adapter_bytes: int,
) -> None:
    together = microbatch_positions(2048, ROW_BYTES, adapter_bytes)
    assert adapter_bytes <= 2 * ROW_BYTES * (together + 1)
