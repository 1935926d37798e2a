"""Adapters for servers whose arithmetic is exact, and what sessions and passes give with them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from llmnode.core.budget import Resource
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_DROPOUT, NO_PROMPTS, DeepPrompts, Dropout
from llmnode.core.span import Span
from llmnode.testing.exact_blocks import (
    exact_adapter_gradient,
    exact_adapters,
    exact_gradient,
    exact_input,
    exact_output,
    exact_prompt_gradient,
    exact_prompts,
)
from llmnode.testing.world import GENEROUS
from llmnode.wire.adapter import make_adapter
from llmnode.wire.dropout import SEEDS
from simulation.world import ALL_BLOCKS, MODEL, ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.session.passes import SwarmPasses
    from llmnode.session.router import Router
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.testing import World
    from llmnode.wire.adapter import Adapter
BRIEF = replace(GENEROUS, adapter_idle_s=10.0)
"""Adapters that nothing uses are dropped soon."""


def drawn_adapter(rng: random.Random, blocks: Sequence[int] = range(MODEL.blocks), values: int = 5) -> Adapter:
    """An adapter with parts for these blocks, each of up to this number of values."""
    parts = {}
    for block in blocks:
        size = rng.randint(1, values)
        parts[block] = rng.randbytes(FP32_BYTES * size), size
    return make_adapter(MODEL.digest, parts)


def drawn(seed: int, positions: int) -> bytes:
    return exact_input(random.Random(seed), positions)


def by_sequence(numbers: bytes, lengths: Sequence[int]) -> list[bytes]:
    edges = accumulate((ROW * length for length in lengths), initial=0)
    return [numbers[start:end] for start, end in pairwise(edges)]


def drawn_dropout(rng: random.Random, sequences: int) -> Dropout:
    return Dropout(rng.random(), tuple(rng.randrange(SEEDS) for _ in range(sequences)))


async def there_and_back(
    client: SwarmPasses,
    seed: int,
    lengths: Sequence[int],
    adapter: Adapter | None,
    span: Span = ALL_BLOCKS,
    between: Callable[[], None] = lambda: None,
) -> None:
    """A forward and a backward with `adapter`, which are right to the bit, and so are the gradients for its numbers.

    Half of them have deep prompts too, and half of them dropout. Servers that die `between` are not needed.
    """
    hidden, gradient = drawn(seed, sum(lengths)), drawn(~seed, sum(lengths))
    prompts = DeepPrompts(len(span), 1, 1, drawn(seed, len(span))) if seed % 2 else NO_PROMPTS
    has_dropout = adapter is not None and seed // 2 % 2
    dropout = drawn_dropout(random.Random(seed), len(lengths)) if has_dropout else NO_DROPOUT
    own, parts = exact_prompts(prompts, len(lengths)), {} if adapter is None else adapter.parts
    adapters = exact_adapters(parts, dropout, len(lengths))
    entering, coming = by_sequence(hidden, lengths), by_sequence(gradient, lengths)
    output, crossed = await client.outputs(span, lengths, hidden, adapter, prompts, dropout)
    assert output == b"".join(map(exact_output, entering, [span] * len(entering), adapters, own))
    between()
    found = await client.all_gradients(crossed, gradient)
    assert found.hidden == b"".join(map(exact_gradient, coming, [span] * len(coming), adapters))
    pairs = list(zip(entering, coming, strict=True))
    of_adapter = np.frombuffer(exact_adapter_gradient(pairs, span, adapters, own), np.float32)
    assert found.adapter.tolist() == of_adapter.tolist()
    assert found.prompts.tobytes() == exact_prompt_gradient(coming, span, prompts, adapters)


def parts_held(swarm: World) -> int:
    """The parts that workers hold."""
    return sum(len(parts) for node in swarm.nodes.values() for parts in node.worker.executor.adapters.values())


def nothing_is_left(swarm: World) -> None:
    for node in swarm.nodes.values():
        assert not node.worker.executor.adapters
        assert not node.network.budget.process.held[Resource.ADAPTERS]


async def connection_to(router: Router, span: Span) -> PeerConnection:
    route, connections = await router.finder.find(span, 0, (), hurry=False)
    return connections[route[0].peer]
