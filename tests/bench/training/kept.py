"""Servers should keep nothing of clients that train: their memory over many steps, and what is open after the last.

A server keeps the versions of adapters that clients brought, up to their share of its memory, and for some minutes. So
its memory is sampled from when that share is full. The share itself is read from the servers' own accounts.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from bench.kit.report import Row, at_most, exactly, spread
from bench.training.trainer import ALL_LAYERS, Adapter, remote_trainer, tokens_per_s
from llmnode.core.policy.budget import BudgetPolicy
from llmnode.node.processes import with_worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bench.kit.report import Aim
    from llmnode.node.processes import ServerProcess

MOST_GROWTH = 0.02
OPEN = ("sessions", "kv_tokens_reserved")
SETTLE_S, POLL_S = 30.0, 0.2
_BUDGET_MIB = BudgetPolicy().adapter_bytes / 2**20


@dataclass(frozen=True, slots=True)
class KeptSize:
    """Clients with adapters of these `ranks` for all layers train at once, `steps` a round each."""

    ranks: Sequence[int] = (4, 8, 12, 16)
    warm_up: int = 12
    rounds: int = 125
    steps: int = 2


@dataclass(slots=True)
class Kept:
    """`memory` is that of all servers after each round. `adapters` is the most that one of them then keeps of adapters.
    Each is in MiB. `left` is what is open when the clients have gone.
    """

    memory: list[float]
    adapters: list[float]
    clients: int
    steps: int
    left: dict[str, int]

    @property
    def growth(self) -> float:
        """The growth of the last quarter over the first, by their medians."""
        quarter = max(1, len(self.memory) // 4)
        return statistics.median(self.memory[-quarter:]) / statistics.median(self.memory[:quarter]) - 1

    def rows(self) -> Iterator[Row]:
        what = f"servers' memory over {self.steps} steps of {self.clients} clients, all layers"
        yield {"what": what, "MiB": spread(self.memory), "growth": self.growth}
        yield {"what": "adapters in the cache of a server", "MiB": spread(self.adapters)}

    def aims(self) -> Iterator[Aim]:
        yield at_most("growth of the servers' memory, of the last quarter over the first", self.growth, MOST_GROWTH)
        yield at_most("adapter cache of a server within its budget, MiB", max(self.adapters), _BUDGET_MIB)
        for name, value in self.left.items():
            yield exactly(f"{name} when the clients have gone", value)


async def measure_kept(
    servers: Sequence[ServerProcess], peers: Sequence[str], texts: torch.Tensor, size: KeptSize
) -> Kept:
    """Train with several clients at once, in rounds."""
    memory: list[float] = []
    kept: list[float] = []

    def train() -> None:
        with ExitStack() as stack:
            adapters = [Adapter(rank, ALL_LAYERS) for rank in size.ranks]
            trainers = [stack.enter_context(remote_trainer(peers, each)) for each in adapters]
            for number in range(size.warm_up + size.rounds):
                tokens_per_s(trainers, texts[:1], size.steps)
                if number >= size.warm_up:
                    memory.append(sum(map(_resident_mib, servers)))
                    kept.append(max(trio.from_thread.run(_adapters_mib, server) for server in servers))

    await trio.to_thread.run_sync(train)
    clients = len(size.ranks)
    return Kept(memory, kept, clients, size.rounds * size.steps * clients, await _left(servers))


def _resident_mib(server: ServerProcess) -> float:
    return sum(float(each.memory_info().rss) for each in with_worker(server.pid)) / 2**20


async def _adapters_mib(server: ServerProcess) -> float:
    readout = await server.introspect()
    return float(readout["adapter_bytes"]) / 2**20


async def _left(servers: Sequence[ServerProcess]) -> dict[str, int]:
    """Counts of what is open, once servers have noticed that the clients have gone."""
    left = dict.fromkeys(OPEN, 0)
    with trio.move_on_after(SETTLE_S):
        while True:
            readouts = [await server.introspect() for server in servers]
            left = {name: sum(each[name] for each in readouts) for name in OPEN}
            if not any(left.values()):
                break
            await trio.sleep(POLL_S)
    return left
