"""A batch of sequences that goes through blocks as one pass for each hop, and what the client keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_DROPOUT, NO_PROMPTS, DeepPrompts, Dropout
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.wire import deep_prompts
from llmnode.wire.deep_prompts import prompts_extension
from llmnode.wire.dropout import dropout_extension
from llmnode.wire.pass_messages import ALONE
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from llmnode.core.operations import Buffer
    from llmnode.wire.adapter import Adapter

MOST_ADAPTER_BYTES = 32 << 20
"""Gradients for an adapter in one answer, unless one block has more: servers allow this much."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole sequences of these `lengths` that go through the blocks of `span` together, and what blocks add to them."""

    span: Span
    lengths: tuple[int, ...]
    adapter: Adapter | None = None
    prompts: DeepPrompts = NO_PROMPTS
    """Those of the blocks of `span`."""
    first_prompt: int = 0
    """The place of its first row of prompts, among those of all batches."""
    alone: bool = False
    """Servers compute it together with nothing else, so that its bits are always the same."""
    dropout: Dropout = NO_DROPOUT
    """That of the adapter, with a seed for each sequence: it is fixed before servers are chosen."""

    @property
    def positions(self) -> int:
        return sum(self.lengths)

    def prompts_of(self, blocks: Span) -> DeepPrompts:
        return self.prompts.of_blocks(blocks.start - self.span.start, blocks.end - self.span.start)

    def adapter_within(self, blocks: Span) -> Adapter | None:
        """None if it has no part in these blocks."""
        return None if self.adapter is None or not self.adapter.manifest.within(blocks) else self.adapter

    def extensions(self, blocks: Span) -> dict[str, Any]:  # Any: each extension has its own values
        """Those that servers of these blocks must know."""
        found = prompts_extension(self.prompts_of(blocks))
        if self.adapter_within(blocks) is not None:
            found |= dropout_extension(self.dropout)
        if self.alone:
            found[ALONE] = True
        return found

    def first_of(self, span: Span) -> Span:
        """The first blocks of `span`, so that what is trained in them fits into one frame."""
        end = span.start + 1
        while end < span.end and self._fits(Span(span.start, end + 1)):
            end += 1
        return Span(span.start, end)

    def _fits(self, blocks: Span) -> bool:
        values = 0 if self.adapter is None else self.adapter.manifest.values(blocks)
        return (
            FP32_BYTES * values <= MOST_ADAPTER_BYTES
            and self.prompts_of(blocks).size_bytes <= deep_prompts.MOST_PASS_BYTES
        )


@dataclass(frozen=True, slots=True)
class Crossed:
    """A microbatch after its way through blocks, and what went into the blocks of each hop."""

    batch: Batch
    borders: tuple[tuple[Span, Buffer], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.batch.lengths


def check_repeatable(codec: Codec, *, deterministic: bool) -> None:
    """Raise ConfigError if training is to be `deterministic` in a lossy codec.

    Each hop rounds hidden states once, and routes depend on the time that servers take.
    """
    if deterministic and codec is not Codec.RAW:
        raise ConfigError(
            f"training is not repeatable in the codec {codec}, since each server on the way rounds: "
            "choose the codec raw, or do not ask for deterministic training (deterministic=True, or torch's own switch)"
        )
