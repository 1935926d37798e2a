"""The name of an adapter and what it consists of, as servers and clients agree on it.

An adapter has one part for each of its blocks, so that a server gets only the parts of its own blocks. The manifest
lists the digests of all parts, and its own digest names the adapter. So an adapter never changes: other numbers are
another adapter.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.core.ids import ADAPTER_ID_BYTES, AdapterId
from llmnode.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmnode.core.span import Span
    from llmnode.wire.frame import Buffer

_MAGIC = b"llmnode-adapter-1\n"
_PART = struct.Struct(f"<II{ADAPTER_ID_BYTES}s")
_HEADER_BYTES = len(_MAGIC) + ADAPTER_ID_BYTES
MOST_PARTS = 1024
"""No model has more blocks."""


@dataclass(frozen=True, slots=True)
class PartName:
    """One part: its block, how many numbers its matrices have, and the BLAKE3 of its bytes."""

    block: int
    values: int
    digest: bytes


@dataclass(frozen=True)
class Manifest:
    """All parts of one adapter, by ascending block, and the digest of the model that it is for."""

    model_digest: bytes
    parts: tuple[PartName, ...]

    @cached_property
    def packed(self) -> bytes:
        """Its bytes on the wire."""
        parts = [_PART.pack(each.block, each.values, each.digest) for each in self.parts]
        return b"".join([_MAGIC, self.model_digest, *parts])

    @cached_property
    def digest(self) -> AdapterId:
        """The name of the adapter."""
        return AdapterId(_native.blake3_digest(self.packed))

    def within(self, span: Span) -> tuple[PartName, ...]:
        """The parts of the blocks of `span`."""
        return tuple(each for each in self.parts if span.start <= each.block < span.end)

    def values(self, span: Span) -> int:
        """How many numbers the matrices in the blocks of `span` have."""
        return sum(each.values for each in self.within(span))

    def part(self, block: int) -> PartName | None:
        return next((each for each in self.parts if each.block == block), None)


@dataclass(frozen=True)
class Adapter:
    """An adapter that a client has: the bytes of each part by its block, in the form of `models/lora.py`."""

    manifest: Manifest
    parts: Mapping[int, bytes]
    largest: float = 0.0
    """The largest size of a number in its matrices and scales, as far as its maker has looked."""

    @property
    def digest(self) -> AdapterId:
        return self.manifest.digest


def make_adapter(model_digest: bytes, parts: Mapping[int, tuple[bytes, int]], largest: float = 0.0) -> Adapter:
    """An adapter of these parts by their blocks: the bytes, and how many numbers the matrices have. `largest` is the
    size of the largest number of all.
    """
    blocks = sorted(parts)
    names = [PartName(block, parts[block][1], _native.blake3_digest(parts[block][0])) for block in blocks]
    return Adapter(Manifest(model_digest, tuple(names)), {block: parts[block][0] for block in blocks}, largest)


def unpack_manifest(packed: Buffer) -> Manifest:
    """Raises RemoteProtocolError unless these bytes are the one form of a manifest."""
    data = bytes(packed)
    count, rest = divmod(len(data) - _HEADER_BYTES, _PART.size)
    if not data.startswith(_MAGIC) or rest or not 1 <= count <= MOST_PARTS:
        raise RemoteProtocolError(f"{len(data)} bytes that are no manifest of an adapter")
    parts = tuple(PartName(*each) for each in _PART.iter_unpack(data[_HEADER_BYTES:]))
    are_ascending = all(one.block < other.block for one, other in pairwise(parts))
    if not are_ascending or not all(each.values for each in parts):
        raise RemoteProtocolError("a manifest whose parts are empty, or not in the order of their blocks")
    return Manifest(data[len(_MAGIC) : _HEADER_BYTES], parts)
