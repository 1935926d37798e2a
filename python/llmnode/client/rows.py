"""The rows of a batch through their sessions, beside each other; and which of them begin alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.client.generate import run_blocks
from llmnode.core.model import FP32_BYTES
from llmnode.core.peers.at_once import AtOnce
from llmnode.core.texts.shared_prefix import shared_beginnings
from llmnode.errors import single_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from llmnode.core.ids import AdapterId
    from llmnode.core.route import Route
    from llmnode.session.session import InferenceSession

POSITIONS_PER_HOP = 1024
"""Positions of a batch that are under way at a time, for each hop: one chunk that the hop computes, and one that waits.
With more, the last of many long rows would only wait in a server's memory, until its step counts as lost."""
BYTES_PER_HOP = 24 << 20
"""Their hidden states in fp32 have at most this many bytes: those of wide models fill a server's memory for steps.
Three rows of 128 positions of BLOOM fit, so that a hop has the next one while others are on their way."""


async def run_rows(
    sessions: Sequence[InferenceSession], hidden: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """New hidden states (tokens, hidden_size) of each session through the blocks; None has nothing new.

    Raises SessionLost.
    """
    if len(sessions) == 1:  # a nursery would cost much of a decode's time
        return [None if states is None else await run_blocks(sessions[0], states) for states in hidden]
    outputs: list[torch.Tensor | None] = [None] * len(sessions)
    hops = max(len(session.route) for session in sessions)
    at_once = AtOnce(_under_way([states for states in hidden if states is not None], hops))
    under_way = trio.CapacityLimiter(at_once.number)

    async def run_row(row: int, states: torch.Tensor) -> None:
        async with under_way:
            session = sessions[row]
            refusals = session.memory_refusals
            outputs[row] = await run_blocks(session, states)
            if session.memory_refusals > refusals:
                at_once.refused(under_way.borrowed_tokens)
            else:
                at_once.worked()
            under_way.total_tokens = at_once.number

    with single_error():
        async with trio.open_nursery() as nursery:
            for row, states in enumerate(hidden):
                if states is not None:
                    nursery.start_soon(run_row, row, states)
    return outputs


def _under_way(hidden: Sequence[torch.Tensor], hops: int) -> int:
    """The number of rows that go through a route of this many `hops` at a time."""
    longest = max(hidden, key=len, default=None)
    if longest is None:
        return 1
    positions = min(POSITIONS_PER_HOP, BYTES_PER_HOP // (FP32_BYTES * longest.shape[1]))
    return max(1, hops * positions // len(longest))


async def truncate_rows(sessions: Sequence[InferenceSession], positions: Sequence[int]) -> None:
    """Have each session forget the positions from its own of `positions` on. Raises SessionLost."""
    for session, position in zip(sessions, positions, strict=True):
        if position < session.position:
            await session.truncate(position)


async def fork_rows(forks: Mapping[InferenceSession, Sequence[InferenceSession]]) -> None:
    """Make sessions copies of others: each key's are copies of the key. Raises SessionLost or NoRoute."""
    with single_error():
        async with trio.open_nursery() as nursery:
            for source, targets in forks.items():
                nursery.start_soon(source.fork, targets)


def rows_alike(
    sessions: Sequence[InferenceSession], rows: Iterable[int], tokens: Sequence[Sequence[int]]
) -> list[tuple[list[int], int]]:
    """Those of `rows` that have the same route and adapter, and begin with the same tokens, and with how many."""
    by_route: dict[tuple[Route, AdapterId | None], list[int]] = {}
    for row in sorted(rows, key=lambda row: tuple(tokens[row])):
        by_route.setdefault((sessions[row].route, adapter_id(sessions[row])), []).append(row)
    return [
        ([beside[text] for text in run.texts], run.tokens)
        for beside in by_route.values()
        for run in shared_beginnings([tokens[row] for row in beside])
        if run.tokens
    ]


def split_runs(
    runs: Sequence[tuple[list[int], int]], hidden: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], list[int]]:
    """Cut `hidden` into the states that each row runs first, and those after them.

    The first row of each of `runs` (`rows_alike`) runs their beginning for all. The third result names it for each row.
    """
    firsts = list(hidden)
    rests: list[torch.Tensor | None] = [None] * len(hidden)
    origins = list(range(len(hidden)))
    for (first, *copies), shared in runs:
        for row in (first, *copies):
            states = hidden[row]
            assert states is not None, "only rows with new tokens are in a run"
            firsts[row], rests[row] = (states[:shared] if row == first else None), states[shared:]
            origins[row] = first
    return firsts, rests, origins


def adapter_id(session: InferenceSession) -> AdapterId | None:
    """The name of its adapter: only sessions of the same one can become copies of each other."""
    return None if session.adapter is None else session.adapter.digest
