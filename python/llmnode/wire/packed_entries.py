"""A packed list or map is read entry by entry: it may have thousands, and each may claim to hold millions of values.

The bytes come from a peer. None of them are made into objects before their entry's size is known, and no more of them
are looked at than an entry may have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.wire.frame import Buffer

ENTRIES_AT_ONCE = 128
"""After this number of entries other tasks may have their turn. Each entry takes three to seven microseconds."""
_FED_BYTES = 1 << 16
_HEADER_BYTES = 5


class PackedEntries:
    """The entries of a list, of a map, or of the lists in a list. Raises ValueError, or an error of msgpack."""

    def __init__(self, payload: Buffer, most: int, *, is_map: bool = False) -> None:
        self._payload = memoryview(payload)
        self._size_bytes = len(payload)
        self._unpacker = msgpack.Unpacker(max_buffer_size=self._size_bytes + 1)
        self._fed_bytes = min(self._size_bytes, _FED_BYTES)
        self._unpacker.feed(self._payload[: self._fed_bytes])
        self.length: int = self._unpacker.read_map_header() if is_map else self._unpacker.read_array_header()
        if self.length > most:
            raise ValueError(f"{self.length} entries, and {most} are the most")
        self.tell: Callable[[], int] = self._unpacker.tell
        """The bytes that were read."""

    def begin_list(self, most: int) -> int:
        """The length of the next entry, which is a list. Its entries come next."""
        if self.tell() + _HEADER_BYTES > self._fed_bytes < self._size_bytes:
            self._feed(_HEADER_BYTES)
        if (length := self._unpacker.read_array_header()) > most:
            raise ValueError(f"{length} entries, and {most} are the most")
        return int(length)

    def next(self, most_bytes: int) -> Any:  # Any: what a peer sends is not known yet
        """The next entry, in which no map has anything."""
        start = self.tell()
        if start + most_bytes > self._fed_bytes < self._size_bytes:
            self._feed(most_bytes)
        try:
            self._unpacker.skip()
        except msgpack.OutOfData:
            if self._fed_bytes == self._size_bytes:
                raise
            raise ValueError(f"an entry of more than {most_bytes} bytes") from None
        if (end := self.tell()) > start + most_bytes:
            raise ValueError(f"an entry of more than {most_bytes} bytes")
        return msgpack.unpackb(self._payload[start:end], raw=False, max_map_len=0, max_ext_len=0)

    def _feed(self, size_bytes: int) -> None:
        """Let the unpacker see this much, and little more: to skip four million empty lists takes ten milliseconds."""
        until = min(self._fed_bytes + size_bytes + _FED_BYTES, self._size_bytes)
        self._unpacker.feed(self._payload[self._fed_bytes : until])
        self._fed_bytes = until
