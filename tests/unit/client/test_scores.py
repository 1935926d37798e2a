"""Scores of a forward, as transformers gets them: by row and column, and free to be changed in place."""

from __future__ import annotations

import pytest
import torch

from llmnode.client.batch import ScoredColumns
from llmnode.client.ends import SharedEnds
from llmnode.client.forward import Ran, scores

VOCABULARY = 7
WEIGHT = torch.randn(VOCABULARY, 4, generator=torch.Generator().manual_seed(0))


class _Head:
    """Scores as the real ends do, in inference mode."""

    vocabulary = VOCABULARY

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ WEIGHT.T


@pytest.mark.parametrize("are_apart", [True, False])
@pytest.mark.parametrize(
    "real",
    [[[True]], [[True, True, True]], [[False, True, True]], [[True, True], [False, True]]],
    ids=["a decode", "a prompt", "padding", "two rows"],
)
def test_they_are_those_of_each_real_column_and_may_be_changed(real: list[list[bool]], are_apart: bool) -> None:
    kept = torch.tensor(real)
    rows, columns = kept.shape
    hidden = torch.randn(rows, columns, 4, generator=torch.Generator().manual_seed(1))
    left: list[torch.Tensor | None] = [each[some] for each, some in zip(hidden, kept, strict=True)]
    ran = Ran(kept, left, left, list(range(rows)), [])
    ends = SharedEnds(_Head())  # type: ignore[arg-type]  # all that is asked of them here
    asked = ScoredColumns([range(columns)] * rows, are_apart=are_apart)
    found = scores(ends, ran, asked, VOCABULARY)
    expected = (hidden @ WEIGHT.T) * kept[:, :, None]
    expected = expected if are_apart else expected.flatten(0, 1)
    assert torch.allclose(found, expected, atol=1e-6)
    found[..., 0] = -1.0  # as penalties do
