"""Spot checks of real backwards, with the real tolerances: a server that changes gradients is found, honest ones agree.

That server takes the sequences of a pass one by one, and the others all at once: so honest ones differ by rounding.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.core.operations import Backward, Computed, DeepPrompts
from llmnode.core.policy import ClientPolicy, SpotCheckPolicy
from llmnode.core.span import Span
from llmnode.models.lora import Lora, pack_part, values_of
from llmnode.models.tensors import to_bytes
from llmnode.node.app import NodeConfig, open_node
from llmnode.session.passes import SwarmPasses
from llmnode.testing.hostile import gradient_parts
from llmnode.wire.adapter import make_adapter
from llmnode.wire.payload import Codec
from reference.small import BLOCKS, CONFIGS, HIDDEN_SIZE, save_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llmnode.client.connect import ClientParts
    from llmnode.core.operations import Operation
    from llmnode.node.running_node import RunningNode
    from llmnode.ports import Worker
    from llmnode.session.pass_checks import PassChecks
    from llmnode.session.peer_finder import PeerFinder

pytestmark = [pytest.mark.process, pytest.mark.slow]

POLICY = ClientPolicy(spot_checks=SpotCheckPolicy(1.0))
SPAN = Span(0, BLOCKS)
LENGTHS = (7, 3, 12)
LIES = [("adapter", -1.0), ("adapter", 0.5), ("prompts", -1.0), ("rows", 0.5)]


@dataclass
class Liar:
    """It multiplies its gradients at one of `PassLiar.PLACES`."""

    worker: Worker
    place: str = "rows"
    times: float = 1.0

    def __post_init__(self) -> None:
        do = self.worker.do

        async def do_wrongly(operation: Operation[object]) -> object:
            computed = await do(operation)
            if not isinstance(operation, Backward) or not isinstance(computed, Computed):
                return computed
            numbers, part = np.frombuffer(bytearray(computed.hidden), "<f4"), gradient_parts(operation)[self.place]
            numbers[part.start // 4 : part.stop // 4] *= self.times
            return replace(computed, hidden=numbers.tobytes())

        self.worker.do = do_wrongly  # type: ignore[method-assign,assignment]


@asynccontextmanager
async def served(folder: str) -> AsyncIterator[list[RunningNode]]:
    async with AsyncExitStack() as stack:
        nodes: list[RunningNode] = []
        for _ in range(3):
            peers = nodes[0].addresses if nodes else ()
            config = NodeConfig(folder, f"0:{BLOCKS}", peers=peers, kv_tokens=100, threads=1, worker="thread")
            nodes.append(await stack.enter_async_context(open_node(config)))
        one_by_one: Any = nodes[-1].server.served.worker  # Any: its method is replaced
        one_by_one.pass_positions = lambda _kind, _blocks: 1
        yield nodes


@asynccontextmanager
async def trusting(nodes: list[RunningNode], parts: ClientParts) -> AsyncIterator[PeerFinder]:
    """A client that asks the last node first, and goes on with it when it has lied."""
    addresses = [address for node in nodes for address in node.addresses]
    async with aconnect(addresses[:1], parts=parts, policy=POLICY) as client:
        await client.swarm.meet_all(addresses)
        finder = client.router.finder
        for _ in range(16):
            finder.suspect([node.peer for node in nodes[:-1]])
        with patch.object(finder, "distrust"):
            yield finder


async def train(finder: PeerFinder, codec: Codec) -> PassChecks:
    """A forward and backward with an adapter and prompts, and their checks."""
    passes, generator = SwarmPasses(finder, codec), torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    wide = CONFIGS["llama"]["intermediate_size"]
    by_block = {}
    for block in range(BLOCKS):
        part = {
            "self_attn.q_proj": Lora(0.1 * drawn(2, HIDDEN_SIZE), 0.1 * drawn(HIDDEN_SIZE, 2), 1.0),
            "mlp.down_proj": Lora(0.1 * drawn(3, wide), 0.1 * drawn(HIDDEN_SIZE, 3), 0.5),
        }
        by_block[block] = pack_part(part), values_of(part)
    adapter = make_adapter(passes.model.digest, by_block)
    prompts = DeepPrompts(BLOCKS, 1, 2, to_bytes(drawn(BLOCKS * 2, HIDDEN_SIZE)))
    hidden = to_bytes(drawn(sum(LENGTHS), HIDDEN_SIZE))
    _, crossed = await passes.outputs(SPAN, LENGTHS, hidden, adapter, prompts)
    await passes.all_gradients(crossed, to_bytes(1e-8 * drawn(sum(LENGTHS), HIDDEN_SIZE)))
    return passes.checks


def test_a_server_that_changes_gradients_is_found_and_honest_ones_are_not(tmp_path: Path) -> None:
    async def check() -> None:
        async with served(str(tmp_path)) as nodes, trusting(nodes, load_parts(str(tmp_path))) as finder:
            liar = Liar(nodes[-1].server.served.worker)
            for codec in Codec:
                checks = await train(finder, codec)
                assert (checks.passed, checks.found, checks.undecided, checks.given_up) == (2, [], 0, 0)
                assert checks.largest_deviation > 0
                print(f"{codec}: honest servers differ by {checks.largest_deviation:.1e} of what is allowed")
            for number, (liar.place, liar.times) in enumerate(LIES):
                checks = await train(finder, [*Codec][number])
                assert checks.found == [nodes[-1].peer], (liar.place, liar.times)
                assert checks.undecided == 0

    save_model(tmp_path, "llama", tied=False)
    trio.run(check)
