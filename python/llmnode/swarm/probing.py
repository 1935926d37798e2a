"""Measures the way to another peer: its round trip, and how fast it takes bytes from us.

A peer may answer late, or not at all. So each question has a deadline, and what crosses is bounded. It cannot seem to
be nearer than it is. It can seem to take bytes at most twice as fast as it does. It answers a probe with a digest of
all of its bytes. It can make the round trip long, which is subtracted, but at most half of the time is.
"""

from __future__ import annotations

import secrets
import statistics
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.errors import PeerRefused, PeerTimeout, RemoteProtocolError
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import unpack
from llmnode.wire.probe_messages import Probed

if TYPE_CHECKING:
    from llmnode.core.policy import ProbePolicy
    from llmnode.swarm.peer_connection import PeerConnection


async def measure_round_trip(connection: PeerConnection, policy: ProbePolicy) -> float:
    """The median of a few round trips over `connection`, in seconds. Raises PeerError."""
    times = []
    for _ in range(policy.round_trips):
        began_s = trio.current_time()
        with suppress(PeerRefused):  # a relay has nothing to describe, and says so
            await connection.describe(policy.answer_s)
        times.append(trio.current_time() - began_s)
    return statistics.median(times)


async def measure_upload(connection: PeerConnection, policy: ProbePolicy) -> float:
    """How fast the peer takes bytes from us, in bytes/s. Raises PeerError if it takes no probe.

    The first probes are small: on a slow line they are enough, and on others they open the congestion window.
    """
    round_trip_s = await measure_round_trip(connection, policy)
    rate = 0.0
    for size_bytes in policy.sizes_bytes:
        payload = secrets.token_bytes(size_bytes)  # no relay or proxy on the way can make it smaller
        began_s = trio.current_time()
        try:
            answer = await connection.ask_peer(FrameType.PROBE, FrameType.PROBED, policy.answer_s, payload=payload)
        except (PeerRefused, PeerTimeout):
            if rate:
                break  # it has taken others, and they count
            raise
        took_s = trio.current_time() - began_s
        try:
            if unpack(Probed, answer.meta).digest != _native.blake3_digest(payload):
                raise RemoteProtocolError("answers a probe with a wrong digest")
        except (RemoteProtocolError, PeerRefused) as error:
            raise error.blame(connection.peer) from None
        rate = max(rate, size_bytes / max(took_s - round_trip_s, took_s / 2, policy.least_s))
        if took_s > policy.long_s:
            break
    return rate
