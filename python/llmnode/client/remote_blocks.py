"""Blocks of the model as a module of torch, with gradients for what goes in: the swarm computes both (Petals, 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from llmnode.client.block_adapters import trained_matrices
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.models.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from llmnode.client.block_adapters import BlockAdapters
    from llmnode.client.portal import Portal
    from llmnode.session.passes import SwarmPasses
    from llmnode.wire.adapter import Adapter


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

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is active in all blocks of the model now. Raises ConfigError if servers cannot take it."""
        return self._adapters.adapter(self._adapters.parts())

    def extra_repr(self) -> str:
        return str(self.span)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The output of the last of the blocks, of the shape, dtype and device of `hidden`.

        - `hidden`: (rows, tokens, hidden_size), the input of the first of the blocks. Gradients flow back to it.
        - `attention_mask`: (rows, tokens), nonzero for the tokens that are there. A row's tokens are at the positions 0
          and on. Others are not sent, and come out as 0.

        Raises ConfigError for other shapes, NoRoute if nobody holds some of the blocks, and SessionLost if servers
        failed for too long. Source: Petals (Borzunov et al. 2023), section 3.3.
        """
        size = self._passes.model.hidden_size
        if hidden.dim() != 3 or hidden.shape[2] != size or not hidden.numel():
            raise ConfigError(f"hidden states of shape {tuple(hidden.shape)}: expected (rows, tokens, {size})")
        if attention_mask is not None and attention_mask.shape != hidden.shape[:2]:
            shapes = f"{tuple(attention_mask.shape)} for hidden states of shape {tuple(hidden.shape)}"
            raise ConfigError(f"an attention mask of shape {shapes}: expected (rows, tokens)")
        real = torch.ones(hidden.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask != 0
        real = real.to(hidden.device)
        lengths = [length for length in real.sum(1).tolist() if length]
        if not lengths:
            return torch.zeros_like(hidden)
        if (longest := max(lengths)) > self._passes.model.context_tokens:
            raise ConfigError(f"{longest} positions in a row: the model's context is {self._passes.model.context_text}")
        parts = self._adapters.parts()
        adapter, trained = self._adapters.adapter(parts), trained_matrices(parts, self.span)
        output = _Crossing.apply(hidden[real].float().cpu(), self, lengths, adapter, *trained)
        whole = torch.zeros(hidden.shape, dtype=torch.float32)
        return whole.masked_scatter(real.cpu()[..., None], output).to(hidden)


class _Crossing(torch.autograd.Function):
    """Sequences that lie end to end, (positions, hidden_size), through `blocks`, which have `adapter`.

    `trained` are the matrices of the adapter in these blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        blocks: RemoteBlocks,
        lengths: list[int],
        adapter: Adapter | None,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        passes = blocks._passes
        given = to_bytes(hidden)
        output, ctx.crossed = blocks._portal.call(lambda: passes.outputs(blocks.span, lengths, given, adapter))
        ctx.blocks = blocks
        ctx.matrices = [(each.shape, each.dtype, each.device) for each in trained]
        return from_bytes(output, hidden.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        blocks: RemoteBlocks = ctx.blocks
        wanted = to_bytes(gradients[0].float())
        gradient, values = blocks._portal.call(lambda: blocks._passes.all_gradients(ctx.crossed, wanted))
        flat = torch.from_numpy(values).split([shape.numel() for shape, _, _ in ctx.matrices]) if ctx.matrices else ()
        of_adapter = [
            each.view(shape).to(device, dtype) for each, (shape, dtype, device) in zip(flat, ctx.matrices, strict=True)
        ]
        return from_bytes(gradient, gradients[0].shape[1]), None, None, None, *of_adapter
