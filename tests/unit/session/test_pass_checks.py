"""Two servers' gradients for one pass: honest ones differ by rounding, and lies differ by more."""

from __future__ import annotations

import numpy as np
import pytest

from llmnode.core.model import PRECISIONS
from llmnode.session.pass_answer import PassAnswer
from llmnode.session.pass_checks import (
    _LEAST_SIZE,
    GRADIENT_TIMES,
    MOST_APART,
    _apart,
    _gradient_deviation,
    allowed_for_gradients,
)
from llmnode.session.recompute import tolerance
from llmnode.wire.payload import Codec

MEASURED_INT8 = 0.06
"""Outputs of most positions are this far apart with weights of 8 bits. In other formats: a quarter of the tolerance."""
CASES = [(precision, codec) for precision in PRECISIONS.values() for codec in Codec]
ROWS = np.random.default_rng(1).standard_normal((12, 64)).astype(np.float32)
CANCELLED = ROWS * np.where(np.arange(12) == 3, 1e-6, 1)[:, None].astype(np.float32)
"""The parts of one row's sum have cancelled."""


def rounded(rows: np.ndarray, share: float) -> np.ndarray:
    """Each row with an error of this share of the size of a usual row."""
    error = np.random.default_rng(2).standard_normal(rows.shape)
    size = np.sqrt(np.mean(np.linalg.norm(rows, axis=1) ** 2))
    return np.asarray(rows + share * size * error / np.linalg.norm(error, axis=1, keepdims=True), np.float32)


@pytest.mark.parametrize(("precision", "codec"), CASES, ids=str)
def test_gradients_that_are_zero_negated_or_halved_are_told_from_honest_ones(precision: object, codec: Codec) -> None:
    of_outputs = tolerance(precision, codec)  # type: ignore[arg-type]
    allowed = allowed_for_gradients(of_outputs)
    assert of_outputs <= allowed <= GRADIENT_TIMES * of_outputs
    for lie in (np.zeros_like(ROWS), -ROWS, np.full_like(ROWS, np.nan)):
        assert _apart(ROWS, lie) > allowed
        assert _apart(lie, ROWS) > allowed
    if of_outputs < 0.5:  # else half of the outputs pass too
        assert _apart(ROWS, ROWS / 2) > allowed


@pytest.mark.parametrize(("precision", "codec"), CASES, ids=str)
def test_honest_rounding_passes_be_it_of_a_sum_whose_parts_cancel(precision: object, codec: Codec) -> None:
    of_outputs = tolerance(precision, codec)  # type: ignore[arg-type]
    allowed, measured = allowed_for_gradients(of_outputs), min(of_outputs / 4, MEASURED_INT8)
    assert _apart(ROWS, ROWS) == 0
    assert _apart(ROWS, rounded(ROWS, 3.2 * measured)) <= allowed
    assert _apart(CANCELLED, rounded(CANCELLED, _LEAST_SIZE * allowed)) <= allowed * 1.01


def test_one_wrong_row_or_a_share_that_was_asked_for_is_enough() -> None:
    wrong = ROWS.copy()
    wrong[5] = -wrong[5]
    assert _apart(ROWS, wrong) == pytest.approx(2)
    assert allowed_for_gradients(0.0) == 0.0
    assert allowed_for_gradients(1.5) == 1.5


BLOCKS = [7, 40, 1] * 10
"""The numbers of an adapter in each block."""


def answer_of(wrong: str = "", times: float = 1.0) -> PassAnswer:
    """The numbers of one of its places are changed: all, or those of one position or block."""
    numbers = np.random.default_rng(3)
    of_adapter, of_prompts = (numbers.standard_normal(size).astype("<f4") for size in (sum(BLOCKS), 12 * 64))
    rows = ROWS.copy()
    places = {
        "rows": rows,
        "one row": rows[4],
        "adapter": of_adapter,
        "a small block": of_adapter[7:47],
        "prompts": of_prompts,
        "a position of a prompt": of_prompts[-64:],
    }
    if wrong:
        places[wrong] *= np.float32(times)
    return PassAnswer(rows.tobytes(), of_adapter, of_prompts, BLOCKS)


@pytest.mark.parametrize("wrong", ["rows", "one row", "adapter", "a small block", "prompts", "a position of a prompt"])
def test_gradients_that_are_wrong_at_one_place_alone_are_told_from_honest_ones(wrong: str) -> None:
    assert _gradient_deviation(answer_of(), answer_of(), 64) == 0
    for times in (-1.0, 0.0, 0.5, float("nan")):
        for one, other in ((answer_of(), answer_of(wrong, times)), (answer_of(wrong, times), answer_of())):
            assert _gradient_deviation(one, other, 64) > MOST_APART
    assert 0 < _gradient_deviation(answer_of(), answer_of(wrong, 1 + 1e-5), 64) < 1e-4


def test_without_adapter_and_prompts_rows_alone_count() -> None:
    none = np.empty(0, np.float32)
    one, other = (PassAnswer(rows.tobytes(), none, none) for rows in (ROWS, ROWS * np.float32(1.25)))
    assert _gradient_deviation(one, other, 64) == pytest.approx(0.2)
