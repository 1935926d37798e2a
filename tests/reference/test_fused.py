"""Families of the Llama kind run our forward alone; `test_families.py` shows it exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmnode.models.weights.matmul_choice import MOST_BITS, turned
from reference.small import BLOCKS, FUSED, cut, make_model, open_saved, save_model, session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("case", FUSED)
def test_no_forward_of_transformers_runs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(case, tied=False)
    model.save_pretrained(tmp_path)
    whole = cut(open_saved(tmp_path), (0, BLOCKS))  # where their rotary embeddings are compared with ours

    def forward(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a forward of transformers")

    for module in {type(each) for each in model.modules() if type(each).__module__.endswith(f"modeling_{case}")}:
        monkeypatch.setattr(module, "forward", forward)
    scores = whole.forward({session(0): [3, 1, 4]})[session(0)]
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("case", ["llama", "gpt_neox"])
def test_a_few_rows_are_multiplied_in_the_form_that_was_found_fastest(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, case, tied=False)
    folder, tokens = open_saved(tmp_path), [3, 1, 4, 1, 5]
    monkeypatch.setattr("llmnode.models.load.native_blocks", lambda *_: None)  # which multiplies in its own
    expected = cut(folder, (0, BLOCKS)).forward({session(0): tokens})[session(0)]
    rows: list[int] = []

    def counted(hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[-2])
        return turned(hidden, *weights)

    def fastest(weights: Sequence[torch.Tensor], _clock: object) -> dict[Any, list[Any]]:
        return {(each.shape, each.dtype): [counted] * (MOST_BITS + 1) for each in weights}

    monkeypatch.setattr("llmnode.models.weights.matmul_choice.LEAST_BYTES", 0)
    monkeypatch.setattr("llmnode.models.weights.matmul_choice.fastest", fastest)
    whole = cut(folder, (0, BLOCKS))
    rows.clear()  # one position has gone through a block, to see whether sizes fit each other
    scores = whole.forward({session(0): tokens})[session(0)]
    assert rows == [len(tokens)] * 4 * BLOCKS, "queries, keys and values; output; up; down"
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)  # sums of five blocks in another order
