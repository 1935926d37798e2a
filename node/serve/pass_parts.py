"""One pass, given to the worker in parts, so that passes of others go between, and decodes where these wait for passes.

A part has some of the sequences, and goes through some blocks: those that there is time for. A backward keeps what goes
into the blocks of each part. It takes fewer sequences at once if these then go through all blocks in one part: the
worker computes the blocks of a part once, but for a part to begin, the blocks before it have to be computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_DROPOUT, NO_PROMPTS, Backward, Evaluate
from llmnode.core.sequences import grouped, split_rows
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerRefused
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from llmnode.core.operations import Buffer, Computed, DeepPrompts, Dropout
    from llmnode.core.priority import Priority
    from llmnode.core.serving.client_counters import Client
    from llmnode.node.serve.adapter_store import AdapterInUse
    from llmnode.node.serve.served_span import ServedSpan

_KEPT_BYTES = 16 << 20
"""A backward takes fewer sequences at once if it would keep more than this between its parts."""

_ALONE_BYTES = 512 << 10
"""Sequences of a pass that is computed alone go together up to these bytes of hidden states, at every server alike."""


@dataclass(frozen=True, slots=True)
class PassTerms:
    """Says how a client wants a pass to be computed."""

    priority: Priority
    number: int
    """That of the pass among those of its link."""
    trains_adapter: bool = True
    """Else it wants no gradients for the numbers of the adapter."""
    alone: bool = False
    """The bits of the answer depend on nothing else here."""
    dropout: Dropout = NO_DROPOUT
    """That of all sequences."""


class PassParts:
    """The parts of one pass, for the worker of `served`."""

    def __init__(
        self,
        served: ServedSpan,
        span: Span,
        lengths: Sequence[int],
        client: Client,
        adapter: AdapterInUse | None,
        terms: PassTerms,
    ) -> None:
        self.prompts: DeepPrompts = NO_PROMPTS
        """Those of the whole pass. To be set before anything is computed."""
        self._of_prompts: np.ndarray | None = None
        self._adapter = adapter
        self._adapter_values = 0 if adapter is None else adapter.manifest.values(span)
        self._most_adapter_bytes = served.policy.adapter_gradient_bytes
        self._trains_adapter = terms.trains_adapter
        self._of_adapter: np.ndarray | None = None
        self.span = span
        self.positions = sum(lengths)
        self.queue_us = 0
        self.compute_us = 0
        self._worker = served.worker
        self._account = client.peer, terms.priority, None if adapter is None else adapter.digest
        self._group, self._number, self._alone = client.group, terms.number, terms.alone
        self._dropout = terms.dropout
        self._kept_bytes = len(span) * served.model.row_bytes
        """A backward keeps this for each position that goes together."""
        self._lengths = lengths
        self._most_together = _KEPT_BYTES // self._kept_bytes
        self._most_alone = _ALONE_BYTES // served.model.row_bytes
        self._cut(Evaluate)

    def _cut(self, kind: type[Evaluate | Backward]) -> None:
        """Have sequences go together up to the number of positions that there is time and memory for."""
        most_positions = min(self._worker.pass_positions(kind, len(self.span)), self._most_together)
        self._groups = grouped(self._lengths, self._most_alone if self._alone else most_positions)
        self._sizes = [sum(group) for group in self._groups]
        self._rows = [*pairwise(accumulate(map(len, self._groups), initial=0))]

    @property
    def kept_bytes(self) -> int:
        """The memory of a backward for what goes into the blocks of each part, and for the gradients of the adapter.

        Raises PeerRefused if those do not fit into an answer.
        """
        adapter_bytes = FP32_BYTES * self._adapter_values
        if not self._trains_adapter:
            return self._kept_bytes * max(self._sizes) + adapter_bytes  # as they come
        if adapter_bytes > self._most_adapter_bytes:
            raise PeerRefused(RefusalCode.NO_ROOM, "the adapter's gradients are too large: ask for fewer blocks")
        return self._kept_bytes * max(self._sizes) + 3 * adapter_bytes  # as they come, their sum, and the answer

    def release(self) -> None:
        """The pass is over."""
        if self._adapter is not None:
            self._adapter.release()

    def trained_gradients(self) -> Iterator[Buffer]:
        """The sums of gradients over all sequences: the adapter's, and then those of the prompts.

        Raises ConfigError if some are not finite.
        """
        import numpy as np

        for found in (self._of_adapter, self._of_prompts):
            if found is not None:
                if not np.isfinite(found).all():
                    raise ConfigError("gradients of the adapter or of prompts that are not finite")
                yield found.data.cast("B")

    async def outputs(self, hidden: Buffer) -> Buffer:
        parts = zip(self._groups, self._rows, split_rows(hidden, self._sizes), strict=True)
        return b"".join([await self._output(*part) for part in parts])

    async def gradients(self, hidden: Buffer, gradient: Buffer) -> Buffer:
        self._cut(Backward)
        both = (split_rows(each, self._sizes) for each in (hidden, gradient))
        return b"".join([await self._gradient(*part) for part in zip(self._groups, self._rows, *both, strict=True)])

    async def _output(self, lengths: tuple[int, ...], rows: tuple[int, int], hidden: Buffer) -> Buffer:
        start = self.span.start
        while start < self.span.end:
            blocks = self._next(start, lengths, Evaluate)
            hidden = await self._do(self._evaluate(blocks, lengths, rows, hidden))
            start = blocks.end
        return hidden

    async def _gradient(
        self, lengths: tuple[int, ...], rows: tuple[int, int], hidden: Buffer, gradient: Buffer
    ) -> Buffer:
        entering: list[tuple[Span, Buffer]] = []
        start = self.span.start
        while start < self.span.end:
            blocks = self._next(start, lengths, Backward)
            entering.append((blocks, hidden))
            if blocks.end < self.span.end:
                hidden = await self._do(self._evaluate(blocks, lengths, rows, hidden))
            start = blocks.end
        while entering:
            blocks, hidden = entering.pop()
            values = 0 if self._adapter is None else self._adapter.manifest.values(blocks)
            prompts = self._prompts(blocks, rows)
            more = values, self._waited_s, prompts
            whose = self._group, self._number, self._alone
            dropout = self._dropout.of_sequences(*rows)
            backward = Backward(blocks, lengths, hidden, gradient, *self._account, *more, *whose, dropout=dropout)
            found = memoryview(await self._do(backward))
            gradient_bytes = memoryview(gradient).nbytes
            trained = gradient_bytes + FP32_BYTES * values
            self._add_adapter(blocks, found[gradient_bytes:trained])
            self._add_prompts(blocks, rows, found[trained:])
            gradient = found[:gradient_bytes]
        return gradient

    def _evaluate(self, blocks: Span, lengths: tuple[int, ...], rows: tuple[int, int], hidden: Buffer) -> Evaluate:
        more, own = (self._waited_s, self._prompts(blocks, rows)), self._dropout.of_sequences(*rows)
        return Evaluate(blocks, lengths, hidden, *self._account, *more, self._group, self._number, self._alone, own)

    def _prompts(self, blocks: Span, rows: tuple[int, int]) -> DeepPrompts:
        own = self.prompts.of_blocks(blocks.start - self.span.start, blocks.end - self.span.start)
        return own.of_sequences(*rows)

    def _add_adapter(self, blocks: Span, gradient: memoryview) -> None:
        """Add the gradients for the adapter in some blocks."""
        if self._adapter is None or not self._trains_adapter:
            return
        import numpy as np

        if self._of_adapter is None:
            self._of_adapter = np.zeros(self._adapter_values, np.float32)
        values = np.frombuffer(gradient, np.float32)
        first = self._adapter_values - self._adapter.manifest.values(Span(blocks.start, self.span.end))
        self._of_adapter[first : first + len(values)] += values

    def _add_prompts(self, blocks: Span, rows: tuple[int, int], gradient: memoryview) -> None:
        """Add the gradients for the prompts of some sequences before some blocks."""
        if not self.prompts:
            return
        import numpy as np

        all_rows = self.prompts.rows
        if self._of_prompts is None:
            values = self.prompts.size_bytes // (FP32_BYTES * all_rows * len(self.span))
            self._of_prompts = np.zeros((len(self.span), all_rows, values), np.float32)
        first, (start, end) = blocks.start - self.span.start, (0, 1) if all_rows == 1 else rows
        place = self._of_prompts[first : first + len(blocks), start:end]
        place += np.frombuffer(gradient, np.float32).reshape(place.shape)

    @property
    def _waited_s(self) -> float:
        return self.queue_us / 1e6

    async def _do(self, operation: Evaluate | Backward) -> Buffer:
        computed: Computed = await self._worker.do(operation)
        self.queue_us += computed.queue_us
        self.compute_us += computed.compute_us
        return computed.hidden

    def _next(self, start: int, lengths: Sequence[int], kind: type[Evaluate | Backward]) -> Span:
        """The blocks from `start` on that there is time for."""
        return Span(start, start + self._worker.pass_blocks(kind, sum(lengths), self.span.end - start))
