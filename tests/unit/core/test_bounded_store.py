"""A bounded store against a plain one: it holds less, and never what it should not; full, it is fair to its sources."""

from __future__ import annotations

import gc
import time
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.core.bounded_store import ENTRY_BYTES, BoundedStore, in_turn

Step = tuple[int, int, str, str, float]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 8),  # key
        st.integers(0, 600),  # bytes
        st.sampled_from(["a", "b", "c"]),  # source
        st.sampled_from(["put", "put", "get", "remove", "drop"]),
        st.floats(0, 4),  # time since the last
    ),
    max_size=60,
)


@given(STEPS, st.integers(0, 99))
@settings(deadline=None)
def test_what_is_found_was_put_last_is_young_enough_and_fits(steps: list[Step], seed: int) -> None:
    dropped: list[int] = []
    store: BoundedStore[int, object] = BoundedStore(2000, 10.0, Random(seed), dropped.append)
    put: dict[int, tuple[object, int, str, float]] = {}
    now_s, puts = 0.0, 0
    for key, size_bytes, source, step, passed_s in steps:
        now_s += passed_s
        if step == "put":
            value = object()
            puts += 1
            assert store.put(key, value, size_bytes, source, now_s)
            put[key] = value, size_bytes, source, now_s
            assert store.get(key, now_s) is value, "a newcomer gets a place"
        elif step == "remove":
            assert store.remove(key) == (key in put and key not in store) or key not in store
            put.pop(key, None)
        elif step == "drop":
            store.drop_expired(now_s)
            assert all(now_s - put[each][3] < 10 for each in store)
        elif (found := store.get(key, now_s)) is not None:
            assert found is put[key][0]
            assert now_s - put[key][3] < 10
        held = sum(put[each][1] + ENTRY_BYTES for each in store)
        assert store.size_bytes == held <= 2000
        assert len(dropped) == puts - len(store)
    for key in store:
        assert store.remove(key)
    assert store.size_bytes == len(store) == 0


def test_the_source_that_holds_most_makes_way() -> None:
    store: BoundedStore[str, int] = BoundedStore(100 * (ENTRY_BYTES + 100), 60.0, Random(1))
    for number in range(20):
        store.put(f"honest {number}", number, 100, f"host {number}", 0.0)
    for number in range(5000):
        store.put(f"sybil {number}", number, 100, "one address", 1.0)
    assert len(store) == 100
    assert all(f"honest {number}" in store for number in range(20))


def test_what_is_larger_than_the_store_is_not_kept() -> None:
    store: BoundedStore[str, int] = BoundedStore(1000, 60.0, Random(1))
    store.put("here", 1, 10, "a", 0.0)
    assert not store.put("large", 2, 1000, "b", 0.0)
    assert list(store) == ["here"]


def test_a_full_store_takes_no_longer_than_an_empty_one() -> None:
    """Every entry has a source of its own, which is the worst case."""
    store: BoundedStore[int, int] = BoundedStore(4 << 20, 60.0, Random(1))
    number = 0
    while store.size_bytes < (4 << 20) - 1000:
        store.put(number, number, 400, str(number), 0.0)
        number += 1
    times = []
    for more in range(50):
        began_s = time.perf_counter()
        store.put(number + more, 0, 400, str(number + more), 0.0)
        times.append(time.perf_counter() - began_s)
    assert sorted(times)[25] < 0.005


@given(st.dictionaries(st.integers(), st.sampled_from(["a", "b", "c", "d"]), max_size=40), st.integers(0, 30))
def test_sources_take_turns(sources: dict[int, str], most: int) -> None:
    chosen = in_turn(sources, most, Random(1))
    assert len(chosen) == len(set(chosen)) == min(most, len(sources))
    counts = {source: sum(sources[each] == source for each in chosen) for source in set(sources.values())}
    for source, count in counts.items():
        available = sum(each == source for each in sources.values())
        others = [number for other, number in counts.items() if other != source]
        if count < available:
            assert count >= max(others, default=0) - 1


def test_entries_of_bytes_are_none_of_the_garbage_collector_s_business() -> None:
    """Else each full collection would look through all of them, while the event loop waits."""
    store: BoundedStore[tuple[bytes, bytes], tuple[bytes, ...]] = BoundedStore(1 << 22, 60.0, Random(1))
    for _ in range(2):
        gc.collect()
    before = len(gc.get_objects())
    for number in range(10_000):
        store.put((b"%d" % number, b"peer"), (b"%d" % number, b"address"), 100, str(number % 16), 0.0)
    for _ in range(3):
        gc.collect()
    assert len(store) == 10_000
    assert len(gc.get_objects()) - before < 500
