"""Reads the payloads of VIEW and NEWS frames in one go. The program makes pauses, for other tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from llmnode.wire import announcement

if TYPE_CHECKING:
    from collections.abc import Generator

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import SwarmPolicy
    from llmnode.wire.announcement import News
    from llmnode.wire.frame import Buffer

T = TypeVar("T")


def unpack_news(payload: Buffer, policy: SwarmPolicy) -> News:
    """Raises RemoteProtocolError."""
    return _whole(announcement.unpack_news(payload, policy))


def unpack_sequences(payload: Buffer, policy: SwarmPolicy) -> dict[PeerId, int]:
    """Raises RemoteProtocolError."""
    return _whole(announcement.unpack_sequences(payload, policy))


def _whole(parts: Generator[None, None, T]) -> T:
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
