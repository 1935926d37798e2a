"""Two views are compared by digests of their 256 buckets. Only the entries of buckets that differ are then listed.

An entry is the hash of a peer id and the sequence number of its announcement. The first byte of the hash names the
bucket. A stranger chooses its peer id and its sequence numbers, but cannot hide an announcement by them:

- The hash has 96 bits. It takes some 2^84 new keys to find one with the hash of any peer of a full view.
- The digest of a bucket has 64 bits and a random salt, which the asker draws for each exchange. So nobody can search
  for other entries with the same digest, and an accident, one in 2^64, ends with the exchange.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from llmnode.core.ids import PeerId

Entry: TypeAlias = bytes
PeerHash: TypeAlias = bytes

BUCKETS = 256
SALT_BYTES = 16
DIGEST_BYTES = 8
HASH_BYTES = 12
SEQUENCE_BYTES = 6
"""Milliseconds since 1970, big-endian: entries of one peer are in the order of their age."""
ENTRY_BYTES = HASH_BYTES + SEQUENCE_BYTES


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of two lists of entries, as one side sees them."""

    missing: list[PeerHash]
    """The peers of which the other side has something newer."""
    newer: list[Entry]
    """Our entries that the other side lacks, or has an older one for."""


def entry_of(peer: PeerId, sequence: int) -> Entry:
    digest = hashlib.blake2b(peer.encode(), digest_size=HASH_BYTES).digest()
    return digest + sequence.to_bytes(SEQUENCE_BYTES, "big")


def hash_of(entry: Entry) -> PeerHash:
    """The hash of its peer."""
    return entry[:HASH_BYTES]


def in_buckets(entries: Iterable[Entry]) -> list[list[Entry]]:
    """All buckets, in their order. Equal entries give equal buckets, in whatever order they come."""
    buckets: list[list[Entry]] = [[] for _ in range(BUCKETS)]
    for entry in entries:
        buckets[entry[0]].append(entry)
    for bucket in buckets:
        bucket.sort()
    return buckets


def digests_of(buckets: Iterable[Collection[Entry]], salt: bytes) -> list[bytes]:
    return [hashlib.blake2b(b"".join(each), key=salt, digest_size=DIGEST_BYTES).digest() for each in buckets]


def differing(ours: Iterable[bytes], theirs: Iterable[bytes]) -> list[int]:
    """The numbers of the buckets whose digests differ."""
    return [number for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]


def compare(ours: Iterable[Entry], theirs: Iterable[Entry]) -> Difference:
    """Compare the entries of the same buckets: one for each peer."""
    our_entries = {entry[:HASH_BYTES]: entry for entry in ours}  # `hash_of` takes twice the time
    their_entries = {entry[:HASH_BYTES]: entry for entry in theirs}
    return Difference(
        missing=[peer for peer, entry in their_entries.items() if entry > our_entries.get(peer, b"")],
        newer=[entry for peer, entry in our_entries.items() if entry > their_entries.get(peer, b"")],
    )
