"""Rates: no more than a burst and what the time allows, whatever the order of keys and times."""

from __future__ import annotations

import ast
import gc
import tracemalloc
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import llmnode
from llmnode.core.policy import BudgetPolicy
from llmnode.core.rates import KEYS, Rates

TABLES = ("Rates", "SharedRate", "FadingCounts")
"""The classes of tables that forget all but the latest keys."""


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 3)), max_size=80), st.integers(1, 5), st.floats(0.1, 5))
def test_a_key_gets_its_burst_and_its_rate_and_no_more(
    steps: list[tuple[int, float]], burst: int, per_s: float
) -> None:
    rates, now_s = Rates(burst, per_s), 0.0
    taken: Counter[int] = Counter()
    for key, passed_s in steps:
        now_s += passed_s
        wait_s = rates.wait_s(key, now_s)
        if rates.take(key, now_s):
            assert wait_s == 0
            taken[key] += 1
        else:
            assert wait_s > 0
            assert rates.wait_s(key, now_s + wait_s + 1e-6) == 0, "it is allowed when it was said to be"
        assert taken[key] <= burst + now_s * per_s + 1e-6


def test_few_keys_are_remembered() -> None:
    rates = Rates(1, 1)
    for key in range(3 * KEYS):
        assert rates.take(key, 0.0)
    assert len(rates._buckets) == KEYS
    assert not rates.take(3 * KEYS - 1, 0.0)


def test_what_is_given_back_can_be_taken_again() -> None:
    rates = Rates(2, 0.1)
    for _ in range(20):
        assert rates.take("a", 0.0)
        rates.give_back("a", 0.0)
    rates.give_back("a", 0.0)
    assert [rates.take("a", 0.0) for _ in range(3)] == [True, True, False]


def test_a_key_that_has_its_whole_burst_again_is_not_remembered() -> None:
    rates = Rates(2, 0.1)
    assert rates.take("a", 0.0) and rates.take("b", 0.0)
    rates.give_back("a", 0.0)
    rates.give_back("b", 0.0, 0.5)
    assert [*rates._buckets] == ["b"]


def test_a_flood_of_keys_is_forgotten_while_others_are_used_after_it() -> None:
    """Their memory is outside the budget, so it is not kept longer than it is needed."""
    rates, flood = Rates(2, 0.1), 100
    for number in range(flood):
        assert rates.take(number, 0.0)
    assert rates.take("a", 5.0)
    assert len(rates._buckets) == flood + 1, "none has its whole burst"
    for _ in range(flood):
        rates.count("a", 10.0)
    assert [*rates._buckets] == ["a"]
    assert rates.take(0, 10.0) and rates.take(0, 10.0) and not rates.take(0, 10.0)


def test_a_clock_that_is_set_back_costs_nobody_a_wait() -> None:
    rates = Rates(2, 1)
    assert rates.take("key", 3600.0)
    assert rates.take("key", 0.0)
    assert rates.wait_s("key", 0.0) == 1


def test_full_tables_take_what_the_figure_for_memory_has_for_them() -> None:
    """A key is an address group, or a place: its name is longer than most."""
    gc.collect()
    tracemalloc.start()
    try:
        rates = Rates(16, 1e-6)
        for number in range(KEYS):
            rates.count((f"2a00:1450:{number:04x}::/48", 4001), float(number))
        one_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rates.wait_s("another", 0.0) == 0
    package = Path(llmnode.__file__).parent
    paths = [*package.rglob("*.py"), *(package / "node").resolve().rglob("*.py")]
    calls = [each for path in paths for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)]
    tables = sum(ast.unparse(each.func).partition("[")[0] in TABLES for each in calls)
    assert tables >= 20
    print(f"{tables} tables of {one_bytes / 2**20:.2f} MiB")
    assert tables * one_bytes < BudgetPolicy().tables_bytes
