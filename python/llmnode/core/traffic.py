"""Bytes of hidden states that cross a node's links, as they cross and as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payloads of sessions' frames, without headers. A packed payload has fewer bytes than its plain bytes."""

    sent_bytes: int = 0
    sent_plain_bytes: int = 0
    received_bytes: int = 0
    received_plain_bytes: int = 0

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - before.sent_bytes,
            self.sent_plain_bytes - before.sent_plain_bytes,
            self.received_bytes - before.received_bytes,
            self.received_plain_bytes - before.received_plain_bytes,
        )


class TrafficMeter:
    """Counts the traffic of all links of a node: the payload of each frame, as it crosses and as it is."""

    def __init__(self) -> None:
        self._sent_bytes = self._sent_plain_bytes = 0
        self._received_bytes = self._received_plain_bytes = 0

    def note_sent(self, crossing_bytes: int, plain_bytes: int) -> None:
        self._sent_bytes += crossing_bytes
        self._sent_plain_bytes += plain_bytes

    def note_received(self, crossing_bytes: int, plain_bytes: int) -> None:
        self._received_bytes += crossing_bytes
        self._received_plain_bytes += plain_bytes

    @property
    def total(self) -> Traffic:
        return Traffic(self._sent_bytes, self._sent_plain_bytes, self._received_bytes, self._received_plain_bytes)
