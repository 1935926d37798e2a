"""Files are removed to make space on disk: the longest unused first, no more than needed, and none in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.models.weights.disk_eviction import CachedFile, EvictionPolicy, files_to_remove

POLICY = EvictionPolicy(disk_share=0.25, idle_s=100)
NOW_S = 1000.0


def _kept(*entries: tuple[int, float]) -> list[CachedFile]:
    return [CachedFile(str(number), size_bytes, used_s) for number, (size_bytes, used_s) in enumerate(entries)]


def test_nothing_goes_while_space_is_free() -> None:
    assert files_to_remove(50, "new", _kept((100, 0), (100, 10)), 800, NOW_S, POLICY) == []


def test_the_longest_unused_goes_first() -> None:
    kept = _kept((100, 20), (100, 10), (50, 30))
    assert files_to_remove(50, "new", kept, 750, NOW_S, POLICY) == [kept[1]]
    assert files_to_remove(110, "new", kept, 750, NOW_S, POLICY) == [kept[1], kept[0]]


def test_what_may_be_in_use_stays_and_so_does_what_more_is_kept_of() -> None:
    kept = _kept((190, NOW_S - 99), (60, 0))
    assert files_to_remove(51, "1", kept, 750, NOW_S, POLICY) is None
    assert files_to_remove(51, "new", kept, 750, NOW_S, POLICY) == [kept[1]]


def test_nothing_goes_for_what_does_not_fit_anyhow() -> None:
    assert files_to_remove(251, "new", _kept((100, 0)), 900, NOW_S, POLICY) is None


@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(0, 500), st.floats(0, NOW_S)), max_size=8),
    st.integers(0, 5000),
)
def test_what_is_kept_then_is_within_the_share(
    needed_bytes: int, entries: list[tuple[int, float]], free_bytes: int
) -> None:
    kept = _kept(*entries)
    going = files_to_remove(needed_bytes, "0", kept, free_bytes, NOW_S, POLICY)
    limit = int(POLICY.disk_share * (free_bytes + sum(each.size_bytes for each in kept)))
    left = [each for each in kept if each not in (going or [])]
    if going is None:
        left = [each for each in kept if each.name == "0" or NOW_S - each.used_s < POLICY.idle_s]
        assert sum(each.size_bytes for each in left) + needed_bytes > limit
        return
    assert sum(each.size_bytes for each in left) + needed_bytes <= limit
    assert not going or sum(each.size_bytes for each in [*left, going[-1]]) + needed_bytes > limit, "one too many"
    assert all(each.name != "0" and NOW_S - each.used_s >= POLICY.idle_s for each in going)
