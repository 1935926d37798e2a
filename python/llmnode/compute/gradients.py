"""Sequences through frozen blocks without KV, and gradients back through them: a server's part of fine-tuning.

Petals, section 3.3: a server computes outputs, and gradients for its inputs. Its weights never change, and it keeps
nothing between calls. So a backward computes the blocks again, and keeps the graphs of the last ones, as many as its
memory allows. It keeps what goes into each of the others, and computes them once more, one at a time. Memory is
that of the kept graphs, of one graph more, and of one row of hidden states for each block.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from llmnode.compute.adapted import adapted
from llmnode.compute.attention import Segment, segments_of_forward
from llmnode.compute.deep_prompts import prompted
from llmnode.core.policy import BudgetPolicy
from llmnode.core.span import Span
from llmnode.models.lora import matrices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self

    from llmnode.compute.adapted import AdaptedRows
    from llmnode.compute.deep_prompts import PromptedSequences
    from llmnode.compute.kv import KVPair
    from llmnode.models.fused import FusedSpan
    from llmnode.models.load import SpanModel


GRAPH_BYTES = BudgetPolicy().graph_bytes


class NoKV:
    """The `KV` of a sequence that is computed whole and then forgotten: what is new is all that there is."""

    length = 0
    capacity = 0

    def extend(self, _layer: int, _start: int, keys: torch.Tensor, values: torch.Tensor, _seen_from: int = 0) -> KVPair:
        return keys, values

    def resize(self, _capacity: int) -> None:
        """It needs no memory."""

    def copy(self, _other: Self, _start: int, _end: int) -> None:
        """There is nothing to copy."""


class SpanGradients(NamedTuple):
    """Gradients for the sequences that go in, for the adapter of each of the rows, and for the prompts."""

    states: list[torch.Tensor]
    adapters: list[torch.Tensor]
    """The matrices one after another, those of each block in the order of `models/lora.py: matrices`."""
    prompts: list[torch.Tensor]
    """In the form of `DeepPrompts.values`, flat."""


def outputs_of(
    model: SpanModel | FusedSpan,
    span: Span,
    sequences: Sequence[torch.Tensor],
    rows: Sequence[AdaptedRows] = (),
    prompts: Sequence[PromptedSequences] = (),
) -> list[torch.Tensor]:
    """Put whole `sequences`, each (tokens, hidden_size) in fp32, through the blocks of `span`.

    Sequences of unequal lengths go through the blocks together, without padding. Their `rows`, end to end, may have
    adapters. Some sequences may have `prompts` before each block.
    """
    with torch.no_grad(), adapted(rows):
        row, states = _Row(model, sequences), torch.cat([*sequences])
        if not prompts:
            return row.split(row.through(span, states))
        for block in range(span.start, span.end):
            states = row.through(Span(block, block + 1), prompted(prompts, block, states))
        return row.split(states)


def gradients_of(
    model: SpanModel | FusedSpan,
    span: Span,
    sequences: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    rows: Sequence[AdaptedRows] = (),
    prompts: Sequence[PromptedSequences] = (),
    graph_bytes: int = GRAPH_BYTES,
) -> SpanGradients:
    """Gradients for `sequences`, which go into the blocks of `span`, from `gradients` for what comes out; all in fp32.

    `rows` and `prompts` are those of `outputs_of`, and get gradients too. Weights in 8 bits are differentiated as
    bitsandbytes does: the gradient goes through the weights, and straight through the rounding of inputs. The graphs of
    the last blocks that take at most `graph_bytes` together are kept. Their number changes no bit of the result.
    """
    row = _Row(model, sequences)
    blocks = _computed(row, span, torch.cat([*sequences]), rows, prompts, graph_bytes)
    gradient = torch.cat([*gradients])
    of_adapters: list[list[torch.Tensor]] = [[] for _ in rows]
    of_prompts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while blocks:
        gradient, of_rows = blocks.pop().gradients(gradient)
        for own, found in zip(of_adapters, of_rows, strict=True):
            own[:0] = found
        for own, each in zip(of_prompts, prompts, strict=True):
            own.insert(0, each.gradient(gradient))
    of_all_rows = [torch.cat([gradient.new_empty(0), *own]) for own in of_adapters]
    return SpanGradients(row.split(gradient), of_all_rows, [torch.cat(own) for own in of_prompts])


def _computed(
    row: _Row,
    span: Span,
    states: torch.Tensor,
    rows: Sequence[AdaptedRows],
    prompts: Sequence[PromptedSequences],
    graph_bytes: int,
) -> list[_Block]:
    """All blocks of `span`, the last ones with their graphs.

    The first block shows how much a graph takes. A later one that takes more costs earlier ones their graphs.
    """
    blocks: list[_Block] = []
    kept: deque[_Block] = deque()
    largest_bytes = 0
    for index in range(span.start, span.end):
        block = _Block(row, index, prompted(prompts, index, states), rows)
        blocks.append(block)
        later = span.end - 1 - index
        if blocks[1:] and later and (1 + later) * largest_bytes > graph_bytes:
            states = block.output()
            continue
        states = block.output_with_graph()
        kept.append(block)
        largest_bytes = max(largest_bytes, block.graph_bytes)
        least = 0 if later else 1  # the last block comes next
        while len(kept) > least and sum(each.graph_bytes for each in kept) + later * largest_bytes > graph_bytes:
            kept.popleft().drop_graph()
    return blocks


class _Block:
    """One block of a backward, what goes into it, and perhaps its graph."""

    def __init__(self, row: _Row, index: int, entering: torch.Tensor, rows: Sequence[AdaptedRows]) -> None:
        """`entering` are the states of the `row`, (tokens, hidden_size), whose `rows` have adapters."""
        self._row, self._index, self._entering, self._rows = row, index, entering, rows
        self._graph: tuple[torch.Tensor, torch.Tensor, list[list[torch.Tensor]]] | None = None
        self.graph_bytes = 0

    def output(self) -> torch.Tensor:
        """The states that leave it, (tokens, hidden_size)."""
        with torch.no_grad(), adapted(self._rows):
            return self._row.through(Span(self._index, self._index + 1), self._entering)

    def output_with_graph(self) -> torch.Tensor:
        """The same. It keeps the graph, and counts its bytes."""
        entering = self._entering.detach().requires_grad_()
        leaves = [each.leaves(self._index) for each in self._rows]
        wanted = [matrices(each.parts[self._index]) for each in leaves]
        saved = _Saved([entering, *self._row.tensors_of(self._index), *chain.from_iterable(wanted)])
        with torch.enable_grad(), saved_tensors_hooks(saved.add, _same), adapted(leaves):
            leaving = self._row.through(Span(self._index, self._index + 1), entering)
        self._graph, self.graph_bytes = (leaving, entering, wanted), saved.size_bytes
        return leaving.detach()

    def drop_graph(self) -> None:
        self._graph, self.graph_bytes = None, 0

    def gradients(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]:
        """Gradients for what goes in, and for the matrices of each of the rows, flat. The graph is gone afterwards."""
        if self._graph is None:
            self.output_with_graph()
        assert self._graph is not None
        leaving, entering, wanted = self._graph
        self._graph = None
        found = iter(torch.autograd.grad(leaving, [entering, *chain.from_iterable(wanted)], gradient))
        return next(found), [[next(found).flatten() for _ in own] for own in wanted]


class _Saved:
    """The bytes of what autograd saves for a graph, beside `known` tensors, which are there anyway."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._seen = {each.untyped_storage().data_ptr() for each in known}
        self.size_bytes = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in self._seen:
            self._seen.add(address)
            self.size_bytes += storage.nbytes()
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Row:
    """Sequences that go through blocks together, end to end."""

    def __init__(self, model: SpanModel | FusedSpan, sequences: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._lengths = [len(each) for each in sequences]
        self._segments = [Segment(NoKV(), 0, length) for length in self._lengths]
        self._positions = torch.cat([torch.arange(length) for length in self._lengths]).to(sequences[0].device)

    def through(self, span: Span, states: torch.Tensor) -> torch.Tensor:
        """`states`, (tokens, hidden_size), through the blocks of `span`."""
        token = segments_of_forward.set(self._segments)
        try:
            leaving: torch.Tensor = self._model(span, states, self._positions)
            return leaving
        finally:
            segments_of_forward.reset(token)

    def tensors_of(self, block: int) -> Iterator[torch.Tensor]:
        """The weights of a block."""
        own = self._model.blocks[block - self._model.span.start]
        return chain(own.parameters(), own.buffers())

    def split(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [*states.split(self._lengths)]
