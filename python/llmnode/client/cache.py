"""What transformers passes on as `past_key_values`: sessions, one for each row of a batch.

The keys and values themselves are with the servers. Rows of unequal length need no padding there: what transformers
pads on the left is left out of the row's session.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import trio
from transformers import Cache

from llmnode.client.generate import run_blocks
from llmnode.errors import ConfigError, LocalProtocolError, single_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.connect import Client
    from llmnode.client.portal import Portal


class SessionCache(Cache):
    """`rows` sessions of `max_length` positions, opened at once. A context manager; `close` frees the servers' KV.

    Columns are positions of the padded batch, as transformers counts them; `paddings` says for each row how many of the
    first ones are not in its session.
    """

    def __init__(self, portal: Portal, client: Client, rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.columns = 0
        self.paddings: list[int] = [0] * rows
        self._portal = portal
        self._client = client
        with ExitStack() as stack:
            self._sessions = [
                stack.enter_context(portal.enter(client.inference_session(max_length))) for _ in range(rows)
            ]
            self._stack = stack.pop_all()

    def __enter__(self) -> SessionCache:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sessions. Safe to call twice."""
        self._stack.close()

    @property
    def rows(self) -> int:
        return len(self._sessions)

    def positions(self, row: int) -> int:
        """Positions in the row's session."""
        return self._sessions[row].position

    def run_rows(self, hidden: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run new hidden states (tokens, hidden_size) of each row through the blocks, all rows at once.

        A row of None has nothing new. Raises SessionLost.
        """
        return self._portal.call(lambda: self._run_rows(hidden))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return min(session.max_length for session in self._sessions)

    def crop(self, max_length: int) -> None:
        """Forget the columns from `max_length` on; a negative one says how many to forget."""
        columns = self.columns + max_length if max_length < 0 else max_length
        if not 0 <= columns <= self.columns:
            raise LocalProtocolError(f"cannot crop {self.columns} columns to {columns}")
        self._portal.call(lambda: self._truncate(columns))
        self.columns = columns

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise ConfigError("beam search is not supported yet: use num_beams=1, with sampling if you like")

    async def _run_rows(self, hidden: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        outputs: list[torch.Tensor | None] = [None] * self.rows

        async def run_row(row: int, states: torch.Tensor) -> None:
            outputs[row] = await run_blocks(self._sessions[row], states, self._client.policy.chunk_tokens)

        with single_error():
            async with trio.open_nursery() as nursery:
                for row, states in enumerate(hidden):
                    if states is not None:
                        nursery.start_soon(run_row, row, states)
        return outputs

    async def _truncate(self, columns: int) -> None:
        for session, padding in zip(self._sessions, self.paddings, strict=True):
            position = max(0, columns - padding)
            if position < session.position:
                await session.truncate(position)
