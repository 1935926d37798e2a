"""What `llmnode bench pipeline` counts of the times at which tokens come."""

from __future__ import annotations

import pytest

from llmnode.node.bench.pipeline import Run


def test_tokens_are_counted_while_as_many_texts_are_under_way_as_were_asked_for() -> None:
    first, second, third = [1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5], [5.0, 6.0, 7.0, 8.0]
    assert Run(2, [first, second, third], []).speed == pytest.approx(6 / 3.0), "from 1.5 s to 4.5 s: the third is alone"
    assert Run(1, [first, third], []).speed == pytest.approx(7 / 7.0)
