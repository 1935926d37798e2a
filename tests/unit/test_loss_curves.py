"""The examples draw losses that are not finite, as those of a training that has diverged."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", ["between_spans", "deep_prompts", "personas"])
def test_a_curve_has_a_character_for_each_loss_also_for_those_that_are_not_finite(example: str) -> None:
    curve = runpy.run_path(str(EXAMPLES / f"{example}.py"))["curve"]
    assert curve([4.0, 2.0, 0.0]) == "█▄▁"
    assert curve([4.0, math.nan, 2.0, math.inf]) == "█x▄x"
    assert curve([math.nan, math.inf]) == "xx"
    assert curve([0.0, 0.0]) == "▁▁"
