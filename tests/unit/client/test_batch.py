"""Masks and position ids of transformers, and what the session of each row is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmnode.client.batch import (
    PaddedBatch,
    Past,
    Positions,
    check_ends_real,
    check_labels,
    kept_columns,
    read_batch,
)
from llmnode.errors import ConfigError


def positions(kind: str = "rotary", **options: Any) -> Positions:
    config: Any = SimpleNamespace(model_type="bloom" if kind == "alibi" else "llama", **options)
    return Positions(config, learned=10 if kind == "learned" else None)


def read(mask: Any, ids: Any = None, past: Past | None = None, kind: Positions | None = None) -> PaddedBatch:
    mask = None if mask is None else torch.tensor(mask)
    past = past or Past.empty(len(mask))
    columns = mask.shape[-1] - past.real.shape[1]
    return read_batch(past, columns, mask, None if ids is None else torch.tensor(ids), kind or positions())


def after(real: list[list[int]], offsets: list[int | None] | None = None) -> Past:
    held = torch.tensor(real).bool()
    counts = held.sum(dim=1).tolist()
    return Past(held, counts, offsets if offsets is not None else [0 if count else None for count in counts])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_padding_at_either_side_is_left_out(pads: list[int], side: str) -> None:
    columns = 6
    rows = [[0] * pad + [1] * (columns - pad) for pad in pads]
    batch = read(rows if side == "left" else [row[::-1] for row in rows])
    assert batch.real.sum(dim=1).tolist() == [columns - pad for pad in pads]
    assert batch.longest == columns - min(pads)
    assert batch.offsets == ([pad if side == "left" else 0 for pad in pads])


def test_rows_go_on_from_what_the_cache_holds() -> None:
    past = after([[0, 1, 1], [1, 1, 1]], [1, 0])
    batch = read([[0, 1, 1, 1], [1, 1, 1, 1]], past=past)
    assert [ids.tolist() for ids in batch.position_ids] == [[3], [3]]
    assert batch.longest == 4


def test_a_row_of_padding_begins_with_its_first_token() -> None:
    batch = read([[0, 0, 1], [1, 1, 1]], [[1], [2]], after([[0, 0], [1, 1]]))
    assert batch.offsets == [1, 0]


@pytest.mark.parametrize(
    ("mask", "ids", "past", "reason"),
    [
        ([[1, 1, 1]], [[0, 2, 4]], None, "leave gaps"),
        ([[1, 1, 1]], [[0, 1, 0]], None, "leave gaps or begin anew"),
        ([[1, 0, 1]], None, None, "leave gaps"),
        ([[1, 1, 1]], [[5]], after([[1, 1]]), "go on from 5"),
        ([[0, 1, 1]], None, after([[1, 1]]), "differs from that of the tokens in the cache"),
        ([[1, 1]], [[0]], None, "position_ids of shape"),
    ],
)
def test_what_a_session_cannot_do_is_refused(mask: Any, ids: Any, past: Past | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(mask, ids, past)


def test_a_mask_must_cover_old_and_new_columns() -> None:
    past = after([[1, 1]])
    with pytest.raises(ConfigError, match=r"expected \(1, 3\)"):
        read_batch(past, 1, torch.ones(1, 1), None, positions())
    with pytest.raises(ConfigError, match="padded rows"):
        read_batch(after([[0, 1]]), 1, None, None, positions())


@pytest.mark.parametrize("form", ["allowed", "added"])
def test_a_causal_mask_of_four_dimensions_is_one_of_two(form: str) -> None:
    flat = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    allowed = torch.ones(3, 3, dtype=torch.bool).tril() & flat[:, None, None]
    mask = allowed if form == "allowed" else torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    assert torch.equal(read_batch(Past.empty(2), 3, mask, None, positions()).real, flat)
    tree = allowed.clone()
    tree[1, 0, 2, 1] = False
    with pytest.raises(ConfigError, match="not causal"):
        read_batch(Past.empty(2), 3, tree, None, positions())
    with pytest.raises(ConfigError, match="count positions by a mask"):
        read_batch(Past.empty(2), 3, allowed, None, positions("alibi"))


def test_windows_count_what_a_mask_hides_between_tokens() -> None:
    ids = [[0, 0, 1]]  # as `generate` counts
    assert read([[1, 0, 1]], ids).real.sum() == 2
    with pytest.raises(ConfigError, match="windows"):
        read([[1, 0, 1]], ids, kind=positions(sliding_window=8))
    read([[0, 1, 1]], kind=positions(sliding_window=8))


def test_learned_positions_may_be_any_but_packed_rows() -> None:
    learned = positions("learned")
    batch = read([[1, 1, 1]], [[4, 2, 9]], kind=learned)
    assert batch.position_ids[0].tolist() == [4, 2, 9]
    assert not batch.is_uniform
    for outside in (10, -1):
        with pytest.raises(ConfigError, match="embeddings for 0 to 9"):
            read([[1]], [[outside]], kind=learned)
    with pytest.raises(ConfigError, match="pack several sequences"):
        read_batch(Past.empty(1), 3, None, torch.tensor([[0, 1, 0]]), learned)


def test_alibi_counts_without_padding_whatever_the_position_ids() -> None:
    batch = read([[0, 1, 1]], [[7, 7, 7]], kind=positions("alibi"))
    assert batch.position_ids[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("keep", "columns"),
    [
        (0, [[0, 1, 2]] * 2),
        (1, [[2]] * 2),
        (9, [[0, 1, 2]] * 2),
        (torch.tensor([2, 0]), [[2, 0]] * 2),
        (torch.tensor([[1], [2]]), [[1], [2]]),
        (torch.tensor([[True, False, True], [False, True, False]]), [[0, 2], [1]]),
    ],
)
def test_columns_are_kept_as_transformers_keeps_them(keep: Any, columns: list[list[int]]) -> None:
    kept = kept_columns(2, 3, keep)
    assert [list(row) for row in kept.columns] == columns
    assert kept.are_apart == (not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool)


def test_columns_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="logits_to_keep"):
        kept_columns(2, 3, torch.tensor([5]))


def test_no_label_may_follow_padding() -> None:
    real = torch.tensor([[False, True, True]])
    check_labels(torch.tensor([[-100, -100, 4]]), real)
    with pytest.raises(ConfigError, match="follows padding"):
        check_labels(torch.tensor([[-100, 3, 4]]), real)
    with pytest.raises(ConfigError, match="shape"):
        check_labels(torch.tensor([[3, 4]]), real)


def test_a_text_does_not_go_on_from_padding() -> None:
    check_ends_real(None)
    check_ends_real(torch.tensor([[0, 1], [0, 0]]))  # one of padding alone is not run at all
    with pytest.raises(ConfigError, match="padding_side"):
        check_ends_real(torch.tensor([[1, 1], [1, 0]]))
