"""A connection whose other side is gone without a word goes with its last link, even if somebody holds it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import trio

from bench.kit.proxy import ShapingProxy
from llmnode.core.policy import LinkPolicy
from llmnode.net.addresses import tcp_address
from llmnode.net.host import open_network
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.kit.proxy import Shape
    from llmnode.net.link import Libp2pLink
    from llmnode.net.yamux import YamuxConnection

POLICY = LinkPolicy(heartbeat_s=0.05, silence_s=0.3)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Libp2pLink, YamuxConnection, Shape]]:
    """A link, its connection, which somebody holds, and what is between the two sides."""
    proxy = ShapingProxy()
    async with (
        open_network(["/ip4/127.0.0.1/tcp/0"], POLICY) as server,
        open_network([], POLICY) as client,
        trio.open_nursery() as nursery,
    ):
        port = await nursery.start(proxy.run)
        proxy.aim(("127.0.0.1", int(server.listening[0].split("/")[4])))
        link = await client.dial(f"{tcp_address('127.0.0.1', port)}/p2p/{server.peer}")
        connection = cast("YamuxConnection", link._stream.connection.muxed_conn)
        with client._held.hold(connection):
            yield link, connection, proxy.shape
        nursery.cancel_scope.cancel()


@in_trio
async def test_who_holds_a_silent_connection_does_not_keep_it() -> None:
    async with linked() as (link, connection, between):
        between.cut()
        await link.wait_closed()
        await connection.event_ended.wait()


@in_trio
async def test_who_holds_a_connection_that_is_heard_of_keeps_it() -> None:
    async with linked() as (link, connection, _):
        await link.end("done")
        await link.wait_closed()
        assert not connection.event_ended.is_set()
