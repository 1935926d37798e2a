"""The checkout that is started second is faster. The ratio of two checkouts does not count that."""

from __future__ import annotations

import pytest

from bench.checkouts.checkouts import _without_order


@pytest.mark.parametrize("true", [0.8, 1.0, 1.1])
def test_what_comes_from_the_order_alone_is_taken_out_of_the_ratio(true: float) -> None:
    second_is_faster = 1.07
    first, second = true * second_is_faster, true / second_is_faster
    ratios = [first, second * 2, first * 1.5, second, first * 0.9, second * 0.7]
    assert _without_order(ratios) == pytest.approx(true)
