"""Peers of one process that dial from addresses of their own, as if each were on a machine of its own."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from libp2p.transport.tcp.tcp import TCP

if TYPE_CHECKING:
    from libp2p.abc import IRawConnection
    from multiaddr import Multiaddr

source: ContextVar[str] = ContextVar("source")
"""The address from which a task dials, and all tasks that it starts. To be set before a peer begins."""


def dial_from_sources() -> None:
    """Has each peer of this process dial from the `source` of its task, if there is one."""
    dial = TCP.dial

    async def dial_from(self: TCP, address: Multiaddr) -> IRawConnection:
        if host := source.get(""):
            return await TCP.dial_with_source(self, address, (host, 0))  # not the host's own, which asks its gate again
        return await dial(self, address)

    TCP.dial = dial_from  # type: ignore[method-assign, assignment]
