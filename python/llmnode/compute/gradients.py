"""Sequences through frozen blocks without KV, and gradients back through them: a server's part of fine-tuning.

Petals, section 3.3: a server computes outputs, and gradients for its inputs. Its weights never change, and it keeps
nothing between calls. So a backward computes the blocks again: first all of them without gradients, to know what goes
into each block, then one block at a time, the last one first, with gradients. Memory is that of one block's graph, and
of one row of hidden states for each block.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from llmnode.compute.adapted import adapted
from llmnode.compute.attention import Segment, segments_of_forward
from llmnode.compute.deep_prompts import prompted
from llmnode.core.span import Span
from llmnode.models.lora import matrices

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from llmnode.compute.adapted import AdaptedRows
    from llmnode.compute.deep_prompts import PromptedSequences
    from llmnode.compute.kv import KVPair
    from llmnode.models.fused import FusedSpan
    from llmnode.models.load import SpanModel


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
) -> SpanGradients:
    """Gradients for `sequences`, which go into the blocks of `span`, from `gradients` for what comes out; all in fp32.

    `rows` and `prompts` are those of `outputs_of`, and get gradients too. Weights in 8 bits are differentiated as
    bitsandbytes does: the gradient goes through the weights, and straight through the rounding of inputs.
    """
    row = _Row(model, sequences)
    states = [prompted(prompts, span.start, torch.cat([*sequences]))]
    with torch.no_grad(), adapted(rows):
        for block in range(span.start + 1, span.end):
            states.append(prompted(prompts, block, row.through(Span(block - 1, block), states[-1])))
    gradient = torch.cat([*gradients])
    of_adapters: list[list[torch.Tensor]] = [[] for _ in rows]
    of_prompts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for block in reversed(range(span.start, span.end)):
        entering = states.pop().detach().requires_grad_()
        leaves = [each.leaves(block) for each in rows]
        wanted = [matrices(each.parts[block]) for each in leaves]
        with torch.enable_grad(), adapted(leaves):
            leaving = row.through(Span(block, block + 1), entering)
        gradient, *found = torch.autograd.grad(leaving, [entering, *chain.from_iterable(wanted)], gradient)
        for own, names in zip(of_adapters, wanted, strict=True):
            own[:0] = [each.flatten() for each in found[: len(names)]]
            del found[: len(names)]
        for own, each in zip(of_prompts, prompts, strict=True):
            own.insert(0, each.gradient(gradient))
    of_rows = [torch.cat([gradient.new_empty(0), *own]) for own in of_adapters]
    return SpanGradients(row.split(gradient), of_rows, [torch.cat(own) for own in of_prompts])


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

    def split(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [*states.split(self._lengths)]
