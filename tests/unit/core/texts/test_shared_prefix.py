"""Texts of a run share the tokens that all begin with; every text is in one run; a text that shares little does not
cost the others.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.texts.shared_prefix import LEAST_SHARED_TOKENS, SharedBeginning, shared_beginnings

texts_of_few_tokens = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=4)).map(
        lambda parts: [parts[0]] * parts[1] + parts[2]
    ),
    max_size=12,
)


def text(*parts: tuple[str, int]) -> list[int]:
    """Tokens by name and number."""
    return [ord(name) for name, tokens in parts for _ in range(tokens)]


def saved(runs: list[SharedBeginning]) -> int:
    return sum(run.tokens * (len(run.texts) - 1) for run in runs)


@given(texts_of_few_tokens)
def test_each_text_is_in_one_run_and_begins_with_what_it_shares(texts: list[list[int]]) -> None:
    runs = shared_beginnings(texts)
    assert [index for run in runs for index in run.texts] == list(range(len(texts)))
    for run in runs:
        assert (run.tokens >= LEAST_SHARED_TOKENS) == (len(run.texts) > 1)
        beginnings = {tuple(texts[index][: run.tokens]) for index in run.texts}
        assert len(beginnings) == 1
        assert all(len(texts[index]) > run.tokens for index in run.texts if run.tokens)


@given(texts_of_few_tokens)
def test_a_run_of_all_would_not_save_more_than_twice_as_much(texts: list[list[int]]) -> None:
    shared = min((_shared(one, other) for one, other in pairwise(texts)), default=0)
    if shared >= LEAST_SHARED_TOKENS:
        assert 2 * saved(shared_beginnings(texts)) >= shared * (len(texts) - 1)


def _shared(one: list[int], other: list[int]) -> int:
    most = min(len(one), len(other)) - 1
    return max(length for length in range(most + 1) if one[:length] == other[:length]) if most > 0 else 0


SYSTEM, SHOTS = ("s", 25), ("f", 300)


@pytest.mark.parametrize(
    ("texts", "runs"),
    [
        ([], []),
        ([text(SYSTEM)], [(1, 0)]),
        ([text(("s", 16), ("a", 1)), text(("s", 16), ("b", 1))], [(2, 16)]),
        ([text(("s", 15), ("a", 1)), text(("s", 15), ("b", 1))], [(1, 0), (1, 0)]),
        ([text(SYSTEM), text(SYSTEM), text(SYSTEM)], [(3, 24)]),
        ([text(SYSTEM, (name, 5)) for name in "abcd"], [(4, 25)]),
        # A family of its own is not cut to what its neighbours share with it.
        (
            [text(SYSTEM, ("a", 9)), *(text(SYSTEM, SHOTS, (name, 9)) for name in "bcd"), text(SYSTEM, ("e", 9))],
            [(1, 0), (3, 325), (1, 0)],
        ),
        # Pairs that share a little more than all do belong to all.
        ([text(SHOTS, (pair, 50), (name, 9)) for pair in "abc" for name in "xy"], [(6, 300)]),
        ([text(("a", 40), (name, 1)) for name in "xy"] + [text(("b", 40), (name, 1)) for name in "xy"], [(2, 40)] * 2),
    ],
)
def test_runs_of_texts_that_begin_alike(texts: list[list[int]], runs: list[tuple[int, int]]) -> None:
    assert [(len(run.texts), run.tokens) for run in shared_beginnings(texts)] == runs
