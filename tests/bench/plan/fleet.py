"""Real servers whose blocks have a pace of their own (`paced.py`), each behind the proxy of its index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiaddr import Multiaddr

from bench.kit.child import as_program
from bench.plan.paced import BLOCK_US, HOST, QUIET
from llmnode.node.app import THREAD
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack
    from pathlib import Path

    from bench.kit.proxy import Proxies
    from llmnode.core.span import Span
    from llmnode.node.processes import ServerProcess


@dataclass(frozen=True, slots=True)
class PacedServer:
    """The blocks of a server, and the microseconds of one of them."""

    span: Span
    block_us: int
    host: str = "127.0.0.1"
    """The server dials from this address, so that proxies can tell it from others."""


async def start_fleet(
    stack: AsyncExitStack, proxies: Proxies, fleet: Sequence[PacedServer], quiet: Path | None = None
) -> list[ServerProcess]:
    """All of them, ready, until `stack` ends. The others join at the address of the first one.

    With `quiet` they measure their network often, but not while that file is there.
    """
    (first,) = await _start_some(stack, proxies, fleet, range(1), quiet)
    peers = ["--peers", first.address]
    return [first, *await _start_some(stack, proxies, fleet, range(1, len(fleet)), quiet, peers)]


async def _start_some(
    stack: AsyncExitStack,
    proxies: Proxies,
    fleet: Sequence[PacedServer],
    indexes: Sequence[int],
    quiet: Path | None,
    options: Sequence[str] = (),
) -> list[ServerProcess]:
    servers: list[ServerProcess] = []
    for index in indexes:
        host, port = proxies.addresses[index]
        servers += await start_paced(stack, fleet[index], quiet, options, [f"/ip4/{host}/tcp/{port}"])
    await all_ready(servers)
    for index, server in zip(indexes, servers, strict=True):
        listening = Multiaddr(server.listening)
        proxies.aim(index, (listening.value_for_protocol("ip4"), int(listening.value_for_protocol("tcp"))))
    return servers


async def start_paced(
    stack: AsyncExitStack,
    server: PacedServer,
    quiet: Path | None,
    options: Sequence[str] = (),
    announce: Sequence[str] | None = None,
) -> list[ServerProcess]:
    """One server, which announces the address `announce`, by default its own. Await `all_ready` before it is used."""
    given = {BLOCK_US: str(server.block_us), HOST: server.host} | ({} if quiet is None else {QUIET: str(quiet)})
    program = as_program("bench.plan.paced", **given)
    swarm = private_swarm(
        [server.span], threads=1, announce=announce, program=program, options=["--worker", THREAD, *options]
    )
    return await stack.enter_async_context(swarm)
