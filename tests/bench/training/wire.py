"""The bytes that this process has sent and received, as the kernel counts them for each TCP connection (Linux)."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TCP_INFO_BYTES = 232
_BYTES_ACKED_AT = 120
"""In `struct tcp_info` of Linux: bytes that the other side has acknowledged, and after them those that it has sent."""


class Crossed(NamedTuple):
    """Bytes over TCP, with frames' headers, encryption and all else that llmnode adds."""

    sent: int
    received: int


def by_connection() -> dict[object, Crossed]:
    """The bytes of all connections that are open now. Raises ConfigError where the kernel does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        raise ConfigError("bench training reads TCP_INFO: run it on Linux")
    found: dict[object, Crossed] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.type == socket.SOCK_STREAM and own.family in {socket.AF_INET, socket.AF_INET6}:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    ends = own.getsockname(), own.getpeername()
                    found[ends] = Crossed(*struct.unpack_from("QQ", info, _BYTES_ACKED_AT))
        except OSError:  # it is no socket, or was closed meanwhile
            continue
    return found


def crossed_since(before: Mapping[object, Crossed]) -> Crossed:
    """The bytes since `by_connection`, over connections that are open now."""
    new = Crossed(0, 0)
    now = [(each, before.get(ends, new)) for ends, each in by_connection().items()]
    return Crossed(
        sum(each.sent - was.sent for each, was in now), sum(each.received - was.received for each, was in now)
    )
