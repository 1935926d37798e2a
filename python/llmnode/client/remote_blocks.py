"""Blocks of the model as a module of torch, with gradients for what goes in: the swarm computes both (Petals, 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.models.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from llmnode.client.portal import Portal
    from llmnode.session.passes import SwarmPasses


class RemoteBlocks(torch.nn.Module):
    """A range of the model's blocks, which are frozen, and elsewhere. It has no parameters.

    `len(blocks)` is their number; `blocks[3]` and `blocks[3:7]` are some of them. A forward goes through servers
    without a session, and its backward through the same ones, or through others if some have gone.
    """

    def __init__(self, portal: Portal, passes: SwarmPasses, span: Span) -> None:
        super().__init__()
        self.span = span
        self._portal = portal
        self._passes = passes

    def __len__(self) -> int:
        return len(self.span)

    def __getitem__(self, which: int | slice) -> RemoteBlocks:
        """Raises IndexError for a block that is not there, and ConfigError for a range that is empty or has gaps."""
        chosen = range(self.span.start, self.span.end)[which]
        if isinstance(chosen, int):
            chosen = range(chosen, chosen + 1)
        if chosen.step != 1 or not chosen:
            raise ConfigError(f"blocks[{which}]: name one block, or a range of blocks that follow each other")
        return RemoteBlocks(self._portal, self._passes, Span(chosen.start, chosen.stop))

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
        output = _Crossing.apply(hidden[real].float().cpu(), self, lengths)
        whole = torch.zeros(hidden.shape, dtype=torch.float32)
        return whole.masked_scatter(real.cpu()[..., None], output).to(hidden)


class _Crossing(torch.autograd.Function):
    """Sequences that lie end to end, (positions, hidden_size), through `blocks`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, blocks: RemoteBlocks, lengths: list[int]) -> torch.Tensor:
        passes = blocks._passes
        given = to_bytes(hidden)
        output, ctx.crossed = blocks._portal.call(lambda: passes.outputs(blocks.span, lengths, given))
        ctx.blocks = blocks
        return from_bytes(output, hidden.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        blocks: RemoteBlocks = ctx.blocks
        wanted = to_bytes(gradients[0].float())
        gradient = blocks._portal.call(lambda: blocks._passes.gradients(ctx.crossed, wanted))
        return from_bytes(gradient, gradients[0].shape[1]), None, None
