"""The payloads by which two nodes find out what their views have different (`core/view_digests.py`).

A DIGESTS payload is a salt and a digest of every bucket. A DIFFERING payload is a bit for each bucket, the first in the
lowest bit of the first byte, and the sender's entries in the buckets whose bit is set. A MISSING payload is the hashes
of the peers whose announcements are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.view_digests import BUCKETS, DIGEST_BYTES, ENTRY_BYTES, HASH_BYTES, SALT_BYTES
from llmnode.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.core.policy import SwarmPolicy
    from llmnode.core.view_digests import Entry, PeerHash
    from llmnode.wire.frame import Buffer

ASKED_AT_ONCE = 1024
"""A MISSING frame has at most this number of hashes. So each answer takes a few milliseconds."""
_BITMAP_BYTES = BUCKETS // 8


def pack_digests(salt: bytes, digests: Iterable[bytes]) -> bytes:
    return salt + b"".join(digests)


def unpack_digests(payload: Buffer) -> tuple[bytes, list[bytes]]:
    """The salt and the digests. Raises RemoteProtocolError."""
    if len(payload) != SALT_BYTES + BUCKETS * DIGEST_BYTES:
        raise RemoteProtocolError(f"DIGESTS: {len(payload)} bytes are no salt and {BUCKETS} digests")
    return bytes(payload[:SALT_BYTES]), _parts(payload[SALT_BYTES:], DIGEST_BYTES)


def pack_differing(numbers: Iterable[int], buckets: Sequence[Iterable[Entry]]) -> bytes:
    """The buckets of these numbers out of all."""
    chosen = list(numbers)
    bits = sum(1 << number for number in chosen)
    return bits.to_bytes(_BITMAP_BYTES, "little") + b"".join(entry for each in chosen for entry in buckets[each])


def unpack_differing(payload: Buffer, policy: SwarmPolicy) -> tuple[set[int], list[Entry]]:
    """The numbers of the buckets, and the entries in them. Raises RemoteProtocolError."""
    most = _BITMAP_BYTES + 2 * policy.view_peers * ENTRY_BYTES
    if not _BITMAP_BYTES <= len(payload) <= most or (len(payload) - _BITMAP_BYTES) % ENTRY_BYTES:
        raise RemoteProtocolError(f"DIFFERING: {len(payload)} bytes are no list of entries, or one that is too long")
    bits = int.from_bytes(payload[:_BITMAP_BYTES], "little")
    numbers = {number for number in range(BUCKETS) if bits >> number & 1}
    entries = _parts(payload[_BITMAP_BYTES:], ENTRY_BYTES)
    if not numbers.issuperset(entry[0] for entry in entries):
        raise RemoteProtocolError("DIFFERING: an entry of a bucket that does not differ")
    return numbers, entries


def pack_missing(peers: Iterable[PeerHash]) -> bytes:
    return b"".join(peers)


def unpack_missing(payload: Buffer) -> set[PeerHash]:
    """Raises RemoteProtocolError."""
    if len(payload) > ASKED_AT_ONCE * HASH_BYTES or len(payload) % HASH_BYTES:
        raise RemoteProtocolError(f"MISSING: {len(payload)} bytes are no list of hashes, or one that is too long")
    return set(_parts(payload, HASH_BYTES))


def _parts(data: Buffer, size_bytes: int) -> list[bytes]:
    whole = bytes(data)
    return [whole[start : start + size_bytes] for start in range(0, len(whole), size_bytes)]
