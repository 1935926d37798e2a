"""Serving nodes of one swarm in one process, torch imported once: `checked_servers.py START:END ...`.

One whose blocks end in `~` cheats: it adds noise to all that it computes, and signs that. Otherwise each is as
`llmnode serve` has it, with an address of its own. A line of JSON names all of them; they end with stdin.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import trio

from llmnode.core.operations import Computed
from llmnode.node.app import NodeConfig, open_node

if TYPE_CHECKING:
    from llmnode.core.operations import Operation
    from llmnode.node.running_node import RunningNode
    from llmnode.ports import Worker

NOISE = 0.01
"""The share of each value that is changed: a text stays readable."""
KV_TOKENS = 2000


def make_noisy(worker: Worker) -> None:
    do, rng = worker.do, np.random.default_rng(0)

    async def do_noisily(operation: Operation[object]) -> object:
        computed = await do(operation)
        if not isinstance(computed, Computed):
            return computed
        values = np.frombuffer(computed.hidden, "<f4")
        noisy = values * (1 + NOISE * rng.standard_normal(values.shape, np.float32))
        return replace(computed, hidden=noisy.astype("<f4").tobytes())

    worker.do = do_noisily  # type: ignore[method-assign,assignment]


async def main() -> None:
    nodes: list[RunningNode] = []
    async with AsyncExitStack() as stack:
        for blocks in sys.argv[1:]:
            config = NodeConfig(
                blocks=blocks.rstrip("~"),
                peers=nodes[0].addresses if nodes else (),
                kv_tokens=KV_TOKENS,
                threads=1,
                worker="thread",
            )
            nodes.append(await stack.enter_async_context(open_node(config)))
            if blocks.endswith("~"):
                make_noisy(nodes[-1].server.served.worker)
        ready = [{"peer": each.peer, "addresses": list(each.addresses)} for each in nodes]
        print(json.dumps({"event": "ready", "nodes": ready}), flush=True)
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
            async for _ in stdin:
                pass


if __name__ == "__main__":
    trio.run(main)
