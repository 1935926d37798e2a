"""The terms on which a cache opens its sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.operations import NO_PROMPTS, DeepPrompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from llmnode.core.priority import Priority
    from llmnode.wire.adapter import Adapter


@dataclass(frozen=True, slots=True)
class CacheTerms:
    """How the sessions of a cache are opened: with KV for `max_length` positions each.

    If a server has no KV free, a cache that `waits` asks again for some time. One that `grows` moves to longer sessions
    when it is full; any other refuses what exceeds `max_length`. The blocks have `adapters`, one for all rows or one
    for each. Those and the prompts stay as they are.
    """

    max_length: int
    priority: Priority | None = None
    waits: bool = True
    grows: bool = False
    adapters: Sequence[Adapter | None] = (None,)
    prefix: torch.Tensor | None = None
    """(positions, embedding size): what each session begins with, before its first column."""
    prompts: DeepPrompts = NO_PROMPTS
    """Those of all blocks, for the first positions."""

    def adapter_of(self, row: int) -> Adapter | None:
        return self.adapters[row if len(self.adapters) > 1 else 0]

    @property
    def prefix_positions(self) -> int:
        return 0 if self.prefix is None else len(self.prefix)
