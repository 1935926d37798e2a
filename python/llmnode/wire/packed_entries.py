"""A packed list or map is read entry by entry: it may have thousands, and each may claim to hold millions of values.

The bytes come from a peer. None of them are made into objects before their entry's size is known, and no more of them
are looked at than an entry may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

if TYPE_CHECKING:
    from llmnode.wire.frame import Buffer

ENTRIES_AT_ONCE = 128
"""After this number of entries other tasks may have their turn. Each entry takes three to seven microseconds."""
_FED_BYTES = 1 << 16
_HEADER_BYTES = 5


class PackedEntries:
    """Its methods raise ValueError, or an error of msgpack."""

    def __init__(self, payload: Buffer) -> None:
        self._payload = memoryview(payload)
        self._fed_bytes = 0
        self._unpacker = msgpack.Unpacker(max_buffer_size=len(payload) + 1)

    def begin_list(self, most: int) -> int:
        """Its length."""
        self._feed(_HEADER_BYTES)
        return _checked_length(self._unpacker.read_array_header(), most)

    def begin_map(self, most: int) -> int:
        """Its length. A key and a value, one after the other, are two entries."""
        self._feed(_HEADER_BYTES)
        return _checked_length(self._unpacker.read_map_header(), most)

    def next(self, most_bytes: int) -> memoryview:
        """The bytes of the next entry."""
        start = self._unpacker.tell()
        self._feed(most_bytes)
        try:
            self._unpacker.skip()
        except msgpack.OutOfData:
            if self._fed_bytes == len(self._payload):
                raise
            raise ValueError(f"an entry of more than {most_bytes} bytes") from None
        if (end := self._unpacker.tell()) > start + most_bytes:
            raise ValueError(f"an entry of more than {most_bytes} bytes")
        return self._payload[start:end]

    def end(self) -> None:
        """There is nothing else."""
        if self._unpacker.tell() != len(self._payload):
            raise ValueError("more than was to come")

    def _feed(self, size_bytes: int) -> None:
        """Let the unpacker see this much, and little more: to skip four million empty lists takes ten milliseconds."""
        if self._unpacker.tell() + size_bytes > self._fed_bytes < len(self._payload):
            until = min(self._fed_bytes + size_bytes + _FED_BYTES, len(self._payload))
            self._unpacker.feed(self._payload[self._fed_bytes : until])
            self._fed_bytes = until


def _checked_length(length: int, most: int) -> int:
    if length > most:
        raise ValueError(f"{length} entries, and {most} are the most")
    return length
