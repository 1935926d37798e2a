"""The metadata of frames that bring an adapter to a server: its manifest, then the parts that the server lacks."""

from __future__ import annotations

from dataclasses import dataclass

from llmnode.wire.fields import U32, Count, Digest


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Tell a server of an adapter, whose manifest is the payload, for the blocks of a span.

    The answer says which parts of it the server lacks there.
    """

    adapter: Digest
    span_start: U32
    span_end: Count


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The part of an adapter that belongs to one block: the payload. The manifest came before."""

    adapter: Digest
    block: U32
