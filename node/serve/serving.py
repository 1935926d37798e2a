"""What all sessions of a server share, and have done together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ServePolicy
    from llmnode.node.serve.admission import Admission
    from llmnode.node.serve.next_hops import NextHops
    from llmnode.ports import Network, Worker


@dataclass(slots=True)
class ServeStats:
    """What all sessions together have done since the server started."""

    steps: int = 0
    positions: int = 0
    """Of all steps."""
    given_directly: int = 0
    """By the hop before."""
    pushed: int = 0
    """Results, to the hop after."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What all sessions of a server share."""

    worker: Worker
    admission: Admission
    model: ModelInfo
    policy: ServePolicy
    network: Network
    """Signs receipts."""
    next_hops: NextHops
    tally: ServeStats
