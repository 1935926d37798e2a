"""Blocks of the model as a module of torch, with gradients for what goes in: the swarm computes both (Petals, 3.3)."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import trio
from torch.autograd.function import once_differentiable

from llmnode.client.block_adapters import trained_matrices
from llmnode.core.operations import NO_DROPOUT, NO_PROMPTS, DeepPrompts, Dropout
from llmnode.core.span import Span
from llmnode.errors import ConfigError, single_error
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.wire.dropout import SEEDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.client.block_adapters import BlockAdapters, Chosen
    from llmnode.client.portal import Portal
    from llmnode.core.operations import Buffer
    from llmnode.session.pass_batch import Crossed
    from llmnode.session.passes import SwarmPasses
    from llmnode.wire.adapter import Adapter

T = TypeVar("T")


class RemoteBlocks(torch.nn.Module):
    """A range of the model's blocks, which are frozen, and elsewhere.

    `len(blocks)` is their number; `blocks[3]` and `blocks[3:7]` are some of them. A forward goes through servers
    without a session, and its backward through the same ones, or through others if some have gone.

    Its modules have the linear layers of the blocks, by the names of transformers and without weights. PEFT can add
    LoRA to them: the matrices are parameters here, servers compute with them, and gradients come back.
    """

    def __init__(self, portal: Portal, passes: SwarmPasses, span: Span, adapters: BlockAdapters) -> None:
        """`adapters` are those of all blocks of the model, and not only those of `span`."""
        super().__init__()
        self.span = span
        self._portal = portal
        self._passes = passes
        self._adapters = adapters
        for index in range(span.start, span.end):
            self.add_module(str(index), adapters.blocks[index])

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, which: int | slice) -> RemoteBlocks:
        """Raises IndexError for a block that is not there, and ConfigError for a range that is empty or has gaps."""
        chosen = range(self.span.start, self.span.end)[which]
        if isinstance(chosen, int):
            chosen = range(chosen, chosen + 1)
        if chosen.step != 1 or not chosen:
            raise ConfigError(f"blocks[{which}]: name one block, or a range of blocks that follow each other")
        return RemoteBlocks(self._portal, self._passes, Span(chosen.start, chosen.stop), self._adapters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same blocks with adapters of their own, over the same connection: part of a module that is copied."""
        memo |= {id(each): each for each in (self._portal, self._passes)}
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    @property
    def hidden_size(self) -> int:
        return self._passes.model.hidden_size

    @property
    def context_tokens(self) -> int:
        """The model's context, in positions."""
        return self._passes.model.context_tokens

    def adapters(self, rows: int) -> list[Adapter | None]:
        """The adapter that each of `rows` has in all blocks of the model now. Raises ConfigError if servers cannot take
        it.
        """
        found: list[Adapter | None] = [None] * rows
        for each in self._adapters.chosen(rows):
            for row in each.rows:
                found[row] = each.adapter
        return found

    def extra_repr(self) -> str:
        return str(self.span)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        prompts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of the last of the blocks, of the shape, dtype and device of `hidden`.

        - `hidden`: (rows, tokens, hidden_size), the input of the first of the blocks. Gradients flow back to it.
        - `attention_mask`: (rows, tokens), nonzero for the tokens that are there. A row's tokens are at the positions 0
          and on. Others are not sent, and come out as 0.
        - `prompts`: deep prompts, (blocks, rows, positions, hidden_size), or one row for all. Before each block they
          are added to the hidden states at the first positions of a row, and no row is shorter. Gradients flow back.

        Raises ConfigError for other shapes, NumericOverflow if numbers overflow in the blocks, NoRoute if nobody holds
        some of the blocks, and SessionLost if servers failed for too long. Source: Petals (Borzunov et al. 2023),
        section 3.3.
        """
        size = self._passes.model.hidden_size
        if hidden.dim() != 3 or hidden.shape[2] != size or not hidden.numel():
            raise ConfigError(f"hidden states of shape {tuple(hidden.shape)}: expected (rows, tokens, {size})")
        if attention_mask is not None and attention_mask.shape != hidden.shape[:2]:
            shapes = f"{tuple(attention_mask.shape)} for hidden states of shape {tuple(hidden.shape)}"
            raise ConfigError(f"an attention mask of shape {shapes}: expected (rows, tokens)")
        real = torch.ones(hidden.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask != 0
        real = real.to(hidden.device)
        lengths = real.sum(1).tolist()
        if not (longest := max(lengths)):
            parts = [each.parts for each in self._adapters.chosen(len(hidden))]
            trained = [matrix for each in parts for matrix in trained_matrices(each, self.span)]
            return _zeros_of(hidden, [hidden, *trained, *([] if prompts is None else [prompts])])
        if longest > self._passes.model.context_tokens:
            raise ConfigError(f"{longest} positions in a row: the model's context is {self._passes.model.context_text}")
        shortest = min(length for length in lengths if length)
        own_prompts = None if prompts is None else self.fitting_prompts(prompts, len(hidden), shortest)
        chosen = self._adapters.chosen(len(hidden))
        # torch's generator, so that `manual_seed` makes them repeatable; and unchanged where nothing is dropped
        seeds = torch.randint(SEEDS - 1, (len(hidden),)).tolist() if any(each.dropout for each in chosen) else []
        groups = [self._group(each, real, own_prompts, seeds) for each in chosen]
        groups = [each for each in groups if each.lengths]
        given = [tensor for each in groups for tensor in (hidden[each.real].float().cpu(), each.prompts, *each.trained)]
        whole = torch.zeros(hidden.shape, dtype=torch.float32)
        for each, output in zip(groups, _Crossing.apply(self, groups, *given), strict=True):
            whole = whole.masked_scatter(each.real.cpu()[..., None], output)
        return whole.to(hidden)

    def _group(self, chosen: Chosen, real: torch.Tensor, prompts: torch.Tensor | None, seeds: Sequence[int]) -> _Group:
        """The rows of one adapter, of which the tokens `real` are there. `seeds` are those of all rows, if need be."""
        own = torch.zeros_like(real)
        own[[*chosen.rows]] = real[[*chosen.rows]]
        if prompts is not None and prompts.shape[1] > 1:
            prompts = prompts[:, own.any(1).cpu()]
        rows = own.any(1).nonzero().flatten().tolist()
        dropout = Dropout(chosen.dropout, tuple(seeds[row] for row in rows)) if chosen.dropout else NO_DROPOUT
        trained = trained_matrices(chosen.parts, self.span)
        return _Group(own, own.sum(1)[rows].tolist(), chosen.adapter, prompts, trained, dropout)

    def fitting_prompts(self, prompts: torch.Tensor, rows: int, shortest: int) -> torch.Tensor:
        """The deep prompts of `rows` rows, in fp32. Raises ConfigError if they do not fit the blocks or the rows."""
        size = self._passes.model.hidden_size
        if prompts.dim() != 4 or (len(prompts), prompts.shape[3]) != (len(self), size):
            raise ConfigError(
                f"prompts of shape {tuple(prompts.shape)}: expected ({len(self)}, rows, positions, {size})"
            )
        if prompts.shape[1] not in {1, rows} or not 1 <= prompts.shape[2] <= shortest:
            what = f"{prompts.shape[1]} rows of {prompts.shape[2]} prompts for {rows} rows"
            one = "1 row" if rows == 1 else f"1 or {rows} rows"
            raise ConfigError(f"{what}: expected {one}, of 1 to {shortest} prompts, as the shortest row is")
        return prompts.float().cpu()


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The sequences of a batch that have one adapter."""

    real: torch.Tensor  # (rows, tokens): True for tokens that are theirs
    lengths: list[int]
    adapter: Adapter | None
    prompts: torch.Tensor | None
    """Their deep prompts, of all blocks."""
    trained: Sequence[torch.Tensor]
    """The matrices of the adapter."""
    dropout: Dropout

    @property
    def of_trained(self) -> Sequence[tuple[torch.Size, torch.dtype, torch.device]]:
        return [(each.shape, each.dtype, each.device) for each in self.trained]


@dataclass(frozen=True, slots=True, eq=False)
class _Gone:
    """The backward of a group needs this."""

    crossed: Sequence[Crossed]
    prompts: torch.Size | None
    trained: Sequence[tuple[torch.Size, torch.dtype, torch.device]]


class _Crossing(torch.autograd.Function):
    """Groups of sequences through `blocks`, all at once. `given` has for each its sequences, which lie end to end,
    (positions, hidden_size), its prompts, and its matrices.
    """

    @staticmethod
    def forward(
        ctx: Any, blocks: RemoteBlocks, groups: Sequence[_Group], *given: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        passes, left = blocks._passes, iter(given)
        calls: list[Callable[[], Awaitable[tuple[Buffer, Sequence[Crossed]]]]] = []
        for each in groups:
            hidden, prompts, *_ = itertools.islice(left, 2 + len(each.trained))
            assert hidden is not None
            own = NO_PROMPTS
            if prompts is not None:  # copied, since the backward needs them as they are now
                count, rows, positions, _ = prompts.shape
                own = DeepPrompts(count, rows, positions, to_bytes(prompts.clone()))
            given_here = each.lengths, to_bytes(hidden), each.adapter, own, each.dropout
            is_deterministic = torch.are_deterministic_algorithms_enabled()
            calls.append(partial(passes.outputs, blocks.span, *given_here, deterministic=is_deterministic))
        found = blocks._portal.call(lambda: _together(calls))
        ctx.blocks = blocks
        ctx.gone = [
            _Gone(crossed, None if each.prompts is None else each.prompts.shape, each.of_trained)
            for each, (_, crossed) in zip(groups, found, strict=True)
        ]
        return tuple(from_bytes(output, passes.model.hidden_size) for output, _ in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        blocks: RemoteBlocks = ctx.blocks
        if (gone := ctx.gone) is None:
            raise RuntimeError("a second backward through remote blocks: say retain_graph=True in the first one")
        calls = [
            partial(blocks._passes.all_gradients, each.crossed, to_bytes(gradient.float()))
            for each, gradient in zip(gone, gradients, strict=True)
        ]
        all_found = blocks._portal.call(lambda: _together(calls))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.gone = None  # torch frees its saved tensors too, while a program may keep the loss
        of_given: list[torch.Tensor | None] = []
        for each, gradient, found in zip(gone, gradients, all_found, strict=True):
            of_given.append(from_bytes(found.hidden, gradient.shape[1]))
            of_given.append(None if each.prompts is None else torch.from_numpy(found.prompts).view(each.prompts))
            matrices = torch.from_numpy(found.adapter)
            flat = matrices.split([shape.numel() for shape, _, _ in each.trained]) if each.trained else ()
            for values, (shape, dtype, device) in zip(flat, each.trained, strict=True):
                of_given.append(values.view(shape).to(device, dtype))
        return None, None, *of_given


def _zeros_of(hidden: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Zeros of the shape of `hidden`, in a graph in which the gradients of `inputs` are zero."""
    empty = torch.cat([each.flatten()[:0].to(hidden) for each in inputs])
    return torch.zeros_like(hidden).masked_scatter(torch.zeros_like(hidden, dtype=torch.bool), empty)


async def _together(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results of `calls`, which run at the same time. Raises what the first one raises that fails."""
    found: dict[int, T] = {}

    async def run(number: int) -> None:
        found[number] = await calls[number]()

    with single_error():
        async with trio.open_nursery() as nursery:
            for number in range(len(calls)):
                nursery.start_soon(run, number)
    return [found[number] for number in range(len(calls))]
