"""The payloads of DIGESTS, DIFFERING and MISSING: round trips, and whatever else may come under their name."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import SwarmPolicy
from llmnode.core.view_digests import BUCKETS, DIGEST_BYTES, ENTRY_BYTES, HASH_BYTES, SALT_BYTES, in_buckets
from llmnode.errors import RemoteProtocolError
from llmnode.wire.view_digests import (
    ASKED_AT_ONCE,
    pack_differing,
    pack_digests,
    pack_missing,
    unpack_differing,
    unpack_digests,
    unpack_missing,
)

POLICY = SwarmPolicy()
SMALL = replace(POLICY, view_peers=2)
entries = st.binary(min_size=ENTRY_BYTES, max_size=ENTRY_BYTES)
hashes = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)


@given(st.lists(entries, max_size=20), st.sets(st.integers(0, BUCKETS - 1)), st.sets(hashes, max_size=20))
def test_what_is_packed_is_unpacked(held: list[bytes], numbers: set[int], peers: set[bytes]) -> None:
    buckets = in_buckets(held)
    told = [entry for number in sorted(numbers) for entry in buckets[number]]
    assert unpack_differing(pack_differing(sorted(numbers), buckets), POLICY) == (numbers, told)
    assert unpack_missing(pack_missing(peers)) == peers
    salt, digests = bytes(range(SALT_BYTES)), [bytes([number] * DIGEST_BYTES) for number in range(BUCKETS)]
    assert unpack_digests(pack_digests(salt, digests)) == (salt, digests)


@pytest.mark.parametrize("size", [0, 1, SALT_BYTES, 16 + 8 * 255, 16 + 8 * 256 - 1, 16 + 8 * 256 + 1, 1 << 20])
def test_digests_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="DIGESTS"):
        unpack_digests(bytes(size))


@pytest.mark.parametrize("size", [0, 31, 32 + 1, 32 + ENTRY_BYTES - 1, 32 + 5 * ENTRY_BYTES])
def test_a_list_of_entries_that_is_cut_or_too_long_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="DIFFERING"):
        unpack_differing(b"\xff" * size, SMALL)
    assert len(unpack_differing(b"\xff" * (32 + 4 * ENTRY_BYTES), SMALL)[1]) == 4


def test_an_entry_of_a_bucket_that_is_not_said_to_differ_is_refused() -> None:
    differs = (1 << 7).to_bytes(32, "little")
    assert unpack_differing(differs + bytes([7] * ENTRY_BYTES), POLICY)[0] == {7}
    with pytest.raises(RemoteProtocolError, match="does not differ"):
        unpack_differing(differs + bytes([8] * ENTRY_BYTES), POLICY)


@pytest.mark.parametrize("size", [1, HASH_BYTES - 1, HASH_BYTES + 1, (ASKED_AT_ONCE + 1) * HASH_BYTES])
def test_a_list_of_hashes_that_is_cut_or_too_long_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="MISSING"):
        unpack_missing(bytes(size))


@given(st.binary(max_size=200))
def test_noise_is_refused_or_a_list(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_digests(noise)
    with contextlib.suppress(RemoteProtocolError):
        assert len(unpack_differing(noise, POLICY)[1]) == (len(noise) - BUCKETS // 8) / ENTRY_BYTES
    with contextlib.suppress(RemoteProtocolError):
        assert len(unpack_missing(noise)) <= len(noise) / HASH_BYTES
