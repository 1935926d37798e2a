"""Adapters for servers whose arithmetic is exact, and what sessions and passes give with them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from llmnode.core.budget import Resource
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.core.span import Span
from llmnode.testing.exact_blocks import (
    exact_adapter_gradient,
    exact_gradient,
    exact_input,
    exact_output,
    exact_prompt_gradient,
    exact_prompts,
)
from llmnode.testing.world import GENEROUS
from llmnode.wire.adapter import make_adapter
from simulation.world import ALL_BLOCKS, MODEL, ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

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


async def there_and_back(
    client: SwarmPasses, seed: int, lengths: Sequence[int], adapter: Adapter | None, span: Span = ALL_BLOCKS
) -> None:
    """A forward and a backward with `adapter`, which are right to the bit, and so are the gradients for its numbers.

    Half of them have deep prompts too.
    """
    hidden, gradient = drawn(seed, sum(lengths)), drawn(~seed, sum(lengths))
    parts = {} if adapter is None else adapter.parts
    prompts = DeepPrompts(len(span), 1, 1, drawn(seed, len(span))) if seed % 2 else NO_PROMPTS
    own = exact_prompts(prompts, len(lengths))
    entering, coming = by_sequence(hidden, lengths), by_sequence(gradient, lengths)
    output, crossed = await client.outputs(span, lengths, hidden, adapter, prompts)
    expected = [exact_output(each, span, parts, prompt) for each, prompt in zip(entering, own, strict=True)]
    assert output == b"".join(expected)
    found = await client.all_gradients(crossed, gradient)
    assert found.hidden == b"".join(exact_gradient(each, span, parts) for each in coming)
    pairs = list(zip(entering, coming, strict=True))
    of_adapter = np.frombuffer(exact_adapter_gradient(pairs, span, parts, own), np.float32)
    assert found.adapter.tolist() == of_adapter.tolist()
    assert found.prompts.tobytes() == exact_prompt_gradient(coming, span, prompts, parts)


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
