"""Pings of libp2p over a stream of their own: ours find out whether the other side is there, and theirs have turns."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, cast

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.ping import ID as PING
from libp2p.host.ping import PING_LENGTH
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from llmnode.net.circuit_wire import leave
from llmnode.net.connections import open_stream

if TYPE_CHECKING:
    from libp2p.abc import INetStream
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream

    from llmnode.core.policy import LinkPolicy
    from llmnode.net.admission import ConnectionAdmission
    from llmnode.net.yamux import YamuxConnection
    from llmnode.net.yamux_stream import YamuxStream

__all__ = ["PING", "answer_pings", "close_when_silent"]

SILENT_S = 60.0
"""A stream without a ping for this long is closed, as py-libp2p does."""


async def close_when_silent(connection: SwarmConn, policy: LinkPolicy) -> None:
    """Close a connection whose other side answers no pings any more: libp2p would never notice. Else does not return.

    The pings keep a NAT from forgetting the connection, too. Returns at once if the other side knows no pings.
    """
    try:
        with trio.fail_after(policy.dial_timeout_s):
            stream = await open_stream(connection, PING, policy.dial_timeout_s)
    except trio.TooSlowError:
        await connection.close()
        return
    except BaseLibp2pError:
        return
    try:
        while True:
            with trio.fail_after(policy.silence_s):
                await _ping(stream)
            await trio.sleep(policy.heartbeat_s)
    except (trio.TooSlowError, BaseLibp2pError):
        await connection.close()
    finally:
        with trio.CancelScope(shield=True):
            await stream.reset()


async def _ping(stream: NetStream) -> None:
    sent, left = secrets.token_bytes(PING_LENGTH), PING_LENGTH
    await stream.write(sent)
    while left:
        left -= len(await stream.read(left))


async def answer_pings(admission: ConnectionAdmission, stream: INetStream) -> None:
    """The handler of PING: py-libp2p's own answers as fast as they come."""
    net_stream, amount, in_order = cast("NetStream", stream), 1 / admission.policy.pings_per_stream, False
    connection, muxed_stream = cast("YamuxConnection", stream.muxed_conn), cast("YamuxStream", net_stream.muxed_stream)
    try:
        while ping := await _next_ping(net_stream):
            # If others at its address take all turns, the other side would give the connection up after a few seconds.
            if not (admission.has_free_ping(connection) or await admission.wait_stream_turn(muxed_stream, amount)):
                break
            await muxed_stream.write(ping)
        in_order = not ping
    except (BaseLibp2pError, trio.TooSlowError):
        pass
    finally:
        await leave(net_stream, in_order=in_order)


async def _next_ping(stream: NetStream) -> bytes:
    """Nothing at the end. Raises TooSlowError, or an error of libp2p."""
    ping = b""
    with trio.fail_after(SILENT_S):
        try:
            while len(ping) < PING_LENGTH:
                ping += await stream.muxed_stream.read(PING_LENGTH - len(ping))
        except MuxedStreamEOF:
            return b""
    return ping
