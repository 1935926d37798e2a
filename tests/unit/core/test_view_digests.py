"""Views compared by digests: every difference is found, nothing else, and at what cost."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.view_digests import (
    BUCKETS,
    DIGEST_BYTES,
    ENTRY_BYTES,
    Entry,
    compare,
    differing,
    digests_of,
    entry_of,
    hash_of,
    in_buckets,
)
from unit.calls import calls_counted

SALT = b"a salt of 16 b.."
NOW_MS = 1_800_000_000_000
views = st.dictionaries(st.integers(0, 60).map(lambda number: PeerId(f"peer{number}")), st.integers(0, 3))


def entries_of(view: dict[PeerId, int]) -> list[Entry]:
    return [entry_of(peer, sequence) for peer, sequence in view.items()]


@given(views, views)
def test_exactly_what_one_view_lacks_or_has_older_is_found(one: dict[PeerId, int], other: dict[PeerId, int]) -> None:
    ours, theirs = in_buckets(entries_of(one)), in_buckets(entries_of(other))
    numbers = differing(digests_of(ours, SALT), digests_of(theirs, SALT))
    assert numbers == [number for number in range(BUCKETS) if ours[number] != theirs[number]]
    difference = compare(
        [entry for number in numbers for entry in ours[number]],
        [entry for number in numbers for entry in theirs[number]],
    )
    missing = {hash_of(entry_of(peer, at)) for peer, at in other.items() if at > one.get(peer, -1)}
    newer = {entry_of(peer, at) for peer, at in one.items() if at > other.get(peer, -1)}
    assert (set(difference.missing), set(difference.newer)) == (missing, newer)
    assert (len(difference.missing), len(difference.newer)) == (len(missing), len(newer)), "each of them once"


@given(views, st.randoms(use_true_random=False))
def test_equal_views_have_equal_digests_in_whatever_order_they_came_about(
    view: dict[PeerId, int], rng: random.Random
) -> None:
    shuffled = entries_of(view)
    rng.shuffle(shuffled)
    assert digests_of(in_buckets(shuffled), SALT) == digests_of(in_buckets(entries_of(view)), SALT)


def test_the_digests_of_one_exchange_say_nothing_about_those_of_another() -> None:
    """Else a stranger might search for entries that collide with somebody else's."""
    buckets = in_buckets([entry_of(PeerId("peer"), NOW_MS)])
    one, other = digests_of(buckets, SALT), digests_of(buckets, SALT[::-1])
    assert all(first != second for first, second in zip(one, other, strict=True))
    assert {len(digest) for digest in one} == {DIGEST_BYTES}


def test_entries_of_one_peer_are_in_the_order_of_its_announcements() -> None:
    times = [0, 1, 255, 256, NOW_MS, NOW_MS + 1, 2**48 - 1]
    entries = [entry_of(PeerId("peer"), at) for at in times]
    assert sorted(entries) == entries
    assert {len(entry) for entry in entries} == {ENTRY_BYTES}


def test_the_buckets_of_a_full_view_are_of_like_size() -> None:
    """A stranger may choose peer ids for one bucket. It costs others no more than a bucket that holds all of these."""
    buckets = in_buckets(entry_of(PeerId(f"peer{number}"), NOW_MS) for number in range(4096))
    assert max(map(len, buckets)) < 48


def test_to_compare_full_views_takes_a_few_calls_for_each_peer() -> None:
    """Some 0.1 us a call: to find the buckets, or to compare all entries, takes 1 to 3 ms."""
    ours = [entry_of(PeerId(f"peer{number}"), NOW_MS) for number in range(4096)]
    theirs = [entry_of(PeerId(f"peer{number}"), NOW_MS + 1) for number in range(4096)]
    with calls_counted() as calls:
        digests_of(in_buckets(ours), SALT)
    assert calls[0] < 1.5 * len(ours)
    with calls_counted() as calls:
        assert len(compare(ours, theirs).missing) == len(ours)
    assert calls[0] < 2.5 * len(ours)
