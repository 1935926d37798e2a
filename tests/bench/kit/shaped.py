"""A private swarm of real server processes. Each is behind a proxy whose address it announces (`proxy.py`)."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from multiaddr import Multiaddr

from bench.kit.proxy import open_proxies
from llmnode.node.processes import LLMNODE, all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.kit.proxy import Proxies
    from llmnode.core.span import Span
    from llmnode.node.processes import ServerProcess


@asynccontextmanager
async def shaped_swarm(
    spans: Sequence[Span],
    threads: int,
    *,
    spare: int = 0,
    bytes_per_s: float = math.inf,
    program: Sequence[str] = LLMNODE,
    model: str | None = None,
    options: Sequence[str] = (),
) -> AsyncIterator[tuple[Sequence[ServerProcess], Proxies]]:
    """One ready server for each span. The proxy of the same index leads to it. The `spare` proxies have no target.

    At first links have `bytes_per_s` and no delay. `program`, `model` and `options` are as for `private_swarm`.
    """
    async with AsyncExitStack() as stack:
        proxies = stack.enter_context(open_proxies(len(spans) + spare))
        proxies.shape(one_way_s=0.0, bytes_per_s=bytes_per_s)
        announce = [f"/ip4/{host}/tcp/{port}" for host, port in proxies.addresses[: len(spans)]]
        swarm = private_swarm(spans, threads=threads, announce=announce, program=program, model=model, options=options)
        servers = await stack.enter_async_context(swarm)
        await all_ready(servers)
        for index, server in enumerate(servers):
            listening = Multiaddr(server.listening)
            proxies.aim(index, (listening.value_for_protocol("ip4"), int(listening.value_for_protocol("tcp"))))
        yield servers, proxies
