"""Forwards and backwards without a session, and what they give with the arithmetic of simulations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.testing import exact_output
from llmnode.testing.exact_blocks import exact_gradient, exact_input, exact_prompt_gradient, exact_prompts
from llmnode.testing.worker import ExactExecutor
from simulation.world import ALL_BLOCKS, FORWARD_S, ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from llmnode.core.operations import Buffer, Pass
    from llmnode.core.span import Span
    from llmnode.session.passes import SwarmPasses
    from llmnode.testing import World
    from llmnode.testing.worker import ExactWorker

LENGTHS = [5, 1, 30, 2, 12]


def drawn(seed: int, positions: int) -> bytes:
    return exact_input(random.Random(seed), positions)


def by_sequence(numbers: bytes, lengths: Sequence[int]) -> list[bytes]:
    edges = accumulate((ROW * length for length in lengths), initial=0)
    return [numbers[start:end] for start, end in pairwise(edges)]


def expected_output(
    hidden: bytes, lengths: Sequence[int], span: Span = ALL_BLOCKS, prompts: DeepPrompts = NO_PROMPTS
) -> bytes:
    sequences = zip(by_sequence(hidden, lengths), exact_prompts(prompts, len(lengths)), strict=True)
    return b"".join(exact_output(each, span, prompts=own) for each, own in sequences)


def expected_gradient(gradient: bytes, lengths: Sequence[int], span: Span = ALL_BLOCKS) -> bytes:
    return b"".join(exact_gradient(each, span) for each in by_sequence(gradient, lengths))


def drawn_prompts(rng: random.Random, lengths: Sequence[int], span: Span = ALL_BLOCKS) -> DeepPrompts:
    """None, or deep prompts for all of the sequences or for each."""
    if rng.random() < 0.3:
        return NO_PROMPTS
    rows, positions = rng.choice((1, len(lengths))), rng.randint(1, min(3, *lengths))
    return DeepPrompts(len(span), rows, positions, exact_input(rng, len(span) * rows * positions))


async def there_and_back(
    client: SwarmPasses,
    seed: int,
    lengths: Sequence[int],
    span: Span = ALL_BLOCKS,
    prompts: DeepPrompts = NO_PROMPTS,
) -> None:
    """A forward and a backward, which are right to the bit."""
    hidden, gradient = drawn(seed, sum(lengths)), drawn(~seed, sum(lengths))
    output, crossed = await client.outputs(span, lengths, hidden, prompts=prompts)
    assert output == expected_output(hidden, lengths, span, prompts)
    found = await client.all_gradients(crossed, gradient)
    assert found.hidden == expected_gradient(gradient, lengths, span)
    assert found.prompts.tobytes() == exact_prompt_gradient(by_sequence(gradient, lengths), span, prompts)


def nothing_is_left(swarm: World) -> None:
    for node in swarm.nodes.values():
        assert not node.worker._pass_track.scheduler._counters._groups._queued
        assert not node.server.passes


@dataclass(slots=True)
class PassTime:
    """The time that a server takes for passes."""

    position_s: float
    """That of a position in one block. It may change."""
    spent_s: float = 0.0
    """That of all until now."""


def take_time(worker: ExactWorker, position_s: float, monkeypatch: pytest.MonkeyPatch) -> PassTime:
    """Have each batch of passes take this time for each position and block."""
    time, track = PassTime(position_s), worker._pass_track
    run = track._run

    async def run_slowly(work: Any) -> Any:
        took_s = time.position_s * sum(each.positions * len(each.span) for each in work.passes)
        time.spent_s += took_s
        worker.slower_by_s = took_s - FORWARD_S
        return await run(work)

    monkeypatch.setattr(track, "_run", run_slowly)
    return time


def watch_passes(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Pass]]:
    """The passes that servers compute together, to which others come."""
    computed: list[Sequence[Pass]] = []
    run = ExactExecutor.run

    def watched(executor: ExactExecutor, passes: Sequence[Pass]) -> Sequence[Buffer]:
        computed.append(passes)
        return run(executor, passes)

    monkeypatch.setattr(ExactExecutor, "run", watched)
    return computed
