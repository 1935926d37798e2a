"""Masks of dropout: bits that follow from a sequence's seed, its positions and the layer, and from nothing else."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from llmnode.compute.dropout import DroppedRows
from llmnode.core.operations import Dropout
from unit.dropped import dropped, splitmix64

CPU = torch.device("cpu")
LAYER = "3.mlp.down_proj"
SEEDS = (0, 1, 2**63 - 1, 0x123456789ABCDEF)
LENGTHS = (5, 1, 30, 2)


def mask(probability: float, seeds: tuple[int, ...], lengths: tuple[int, ...], inputs: int = 66) -> torch.Tensor:
    return DroppedRows(Dropout(probability, seeds), lengths, CPU).kept(LAYER, inputs) == 0


def test_the_twin_is_splitmix64() -> None:
    """The outputs for this seed are published with many implementations of it."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, number) for number in range(1, 5)] == expected


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.93])
@pytest.mark.parametrize("inputs", [1, 64, 66, 67])
def test_a_mask_is_that_of_the_twin(probability: float, inputs: int) -> None:
    ours = mask(probability, SEEDS, LENGTHS, inputs)
    pairs = zip(SEEDS, LENGTHS, strict=True)
    assert ours.equal(torch.cat([dropped(seed, LAYER, length, inputs, probability) for seed, length in pairs]))


def test_rows_of_a_sequence_are_the_same_whatever_is_beside_it_and_behind() -> None:
    together = mask(0.3, SEEDS, LENGTHS).split(LENGTHS)
    for seed, length, ours in zip(SEEDS, LENGTHS, together, strict=True):
        assert mask(0.3, (seed,), (length,)).equal(ours)
        assert mask(0.3, (7, seed), (9, length + 4))[9 : 9 + length].equal(ours)


def test_masks_that_are_made_in_several_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mask(0.3, SEEDS, LENGTHS)
    monkeypatch.setattr("llmnode.compute.dropout._TOGETHER", 7 * 17)
    assert mask(0.3, SEEDS, LENGTHS).equal(whole)


@pytest.mark.parametrize("probability", [0.05, 0.5])
def test_the_share_that_is_dropped_is_the_probability_and_positions_are_independent(probability: float) -> None:
    rows = DroppedRows(Dropout(probability, (11, 12)), (256, 256), CPU)
    deviation = (probability * (1 - probability)) ** 0.5
    found = [1 - rows.kept(layer, 256).double() for layer in ("0.a", "0.b", "1.a")]
    for each in found:
        assert abs(each.mean() - probability) < 4 * deviation / each.numel() ** 0.5
        for dimension, size in enumerate(each.shape):  # of each position, and of each input
            shares = each.mean(1 - dimension)
            assert (shares - probability).abs().max() < 5 * deviation / (each.numel() / size) ** 0.5
    others = [each - probability for each in (*found, found[0].roll(1, 0), found[0].roll(1, 1), found[0].roll(256, 0))]
    for one, other in combinations(others, 2):
        assert abs((one * other).mean()) < 5 * deviation**2 / one.numel() ** 0.5


def test_what_is_kept_grows_as_that_of_torch() -> None:
    kept = torch.nn.Dropout(0.2)(torch.ones(100))
    assert kept.max().item() == pytest.approx(DroppedRows(Dropout(0.2, (1,)), (1,), CPU).scale)
