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

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.sent_plain_bytes + other.sent_plain_bytes,
            self.received_bytes + other.received_bytes,
            self.received_plain_bytes + other.received_plain_bytes,
        )

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - before.sent_bytes,
            self.sent_plain_bytes - before.sent_plain_bytes,
            self.received_bytes - before.received_bytes,
            self.received_plain_bytes - before.received_plain_bytes,
        )
