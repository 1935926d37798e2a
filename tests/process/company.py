"""Several clients of this process that train at once on servers of it, so that batches have adapters of all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.executor import SpanExecutor
from llmnode.core.operations import Backward, Evaluate
from llmnode.core.peers.pass_loads import PassLoads
from llmnode.core.route import HopCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Operation, Pass
    from llmnode.core.peers.pass_loads import Holder

T = TypeVar("T")

OTHERS_COME_S = 10.0
"""A pass waits for those of the others for this long. Then it is computed without them."""


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of `calls`, each of which runs in a thread of its own. All begin together."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        torch.set_num_threads(1)
        ready.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


@contextmanager
def in_company(clients: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[type[Pass], int]]:
    """Yields the most adapters that a batch of forwards, and one of backwards, has had until now.

    The first passes of each kind at a server wait there until all `clients` have brought some. Then they are computed
    together, but for the first one. All take the same way, and a server computes all of their blocks at once.
    """
    do, run = BatchingWorker.do, SpanExecutor.run
    came: dict[tuple[BatchingWorker, type], tuple[set[PeerId], trio.Event]] = {}
    most: dict[type[Pass], int] = {Evaluate: 0, Backward: 0}

    async def do_with_others(worker: BatchingWorker, operation: Operation[Any]) -> Any:
        if isinstance(operation, Evaluate | Backward):
            place = worker, type(operation)
            peers, all_came = came.setdefault(place, (set(), trio.Event()))
            peers.add(operation.client)
            if len(peers) == clients:
                all_came.set()
            with trio.move_on_after(OTHERS_COME_S):
                await all_came.wait()
        return await do(worker, operation)

    def costs(_loads: PassLoads, holders: Sequence[Holder], *_args: Any, **_options: Any) -> Any:
        peers = sorted(each.peer for each in holders)
        return {peer: HopCost(block_s=0.001 + 0.001 * number) for number, peer in enumerate(peers)}

    def counted(executor: SpanExecutor, passes: Sequence[Pass]) -> Any:
        kind = type(passes[0])
        most[kind] = max(most[kind], len({each.adapter for each in passes}))
        return run(executor, passes)

    with monkeypatch.context() as patched:
        patched.setattr(PassLoads, "costs", costs)
        patched.setattr(BatchingWorker, "pass_blocks", lambda _worker, _kind, _positions, blocks: blocks)
        patched.setattr(BatchingWorker, "do", do_with_others)
        patched.setattr(SpanExecutor, "run", counted)
        yield most
