"""Every supported family, cut anywhere and fed in any order, scores as transformers does on the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from llmnode.models.families import FAMILIES
from llmnode.models.size import measure_size
from reference.small import (
    BLOCKS,
    CONFIGS,
    SESSION_TOKENS,
    VOCABULARY,
    Cut,
    cut,
    deviation,
    family_of_case,
    kv_bytes,
    make_model,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference

EDGES = (0, 1, 4, BLOCKS)
LENGTHS = (41, 9, 27, 17)
ROUNDS: tuple[dict[int, int], ...] = (
    {0: 11, 1: 1},  # prefill beside prefill, of unequal lengths
    {0: 7, 1: 1, 2: 13},  # chunks later on, beside a decode
    {2: 1, 1: 1, 0: 1},
    {3: 16, 2: 1, 1: 3},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {0: 12, 2: 9},
    {0: 1, 1: 2, 2: 1},
    {0: 8},
    {2: 1},
)
"""How many tokens of each sequence go into each forward; together `LENGTHS`."""


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", CONFIGS)
@torch.inference_mode()
def test_scores_are_those_of_the_whole_model(
    case: str, tied: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = make_model(case, tied=tied)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    epsilon = 4 * deviation(model, tokens)
    assert 0 < epsilon < 1e-3

    scores = _run_rounds(cut(open_saved(tmp_path), EDGES), tokens)
    largest = 0.0
    for row, length in enumerate(LENGTHS):
        ours, theirs = scores[row], expected[row, :length]
        largest = max(largest, (ours - theirs).abs().max().item())
        first, second = theirs.topk(2).values.T
        assert ((ours.argmax(1) == theirs.argmax(1)) | (first - second < epsilon)).all()
    record_property("epsilon", epsilon)
    record_property("deviation", largest)
    assert largest < epsilon


@pytest.mark.parametrize("case", CONFIGS)
def test_a_position_takes_the_kv_that_was_measured(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    whole = cut(folder, (0, BLOCKS))
    whole.forward({session(1): [1, 2, 3]})
    assert kv_bytes(whole.executors[0], session(1)) == BLOCKS * SESSION_TOKENS * measure_size(folder).kv_token_bytes


def test_every_supported_family_is_tested() -> None:
    assert {family_of_case(case) for case in CONFIGS} == FAMILIES.keys()


def _run_rounds(whole: Cut, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Scores of each sequence. Sequence 2 goes astray half-way, is cut back and goes on."""
    parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    position = [0] * len(LENGTHS)
    for number, chunks in enumerate(ROUNDS):
        if number == 5:
            whole.forward({session(2): [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], session(1): [2, 7]})
            whole.truncate(session(2), position[2])
            whole.truncate(session(1), position[1])
        outputs = whole.forward(
            {session(row): tokens[row, position[row] :][:length].tolist() for row, length in chunks.items()}
        )
        for row, length in chunks.items():
            parts[row].append(whole.ends.logits(outputs[session(row)]))
            position[row] += length
    assert tuple(position) == LENGTHS
    whole.close()
    return [torch.cat(rows) for rows in parts]
