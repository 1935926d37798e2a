"""A span that a server has loaded, and the state that its sessions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.ids import AdapterId

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ServePolicy
    from llmnode.core.serving.leased_kv import LeasedKv
    from llmnode.core.span import Span
    from llmnode.node.serve.adapter_store import AdapterInUse, AdapterStore
    from llmnode.node.serve.admission import Admission
    from llmnode.node.serve.conduct import Conduct
    from llmnode.node.serve.next_hops import NextHops
    from llmnode.node.serve.push_inlet import PushDesk
    from llmnode.node.serve.work_turns import WorkTurns
    from llmnode.ports import Network, Worker


@dataclass(slots=True)
class ServeStats:
    """Sums over all sessions since the server started, of all spans that it has served."""

    steps: int = 0
    positions: int = 0
    """The positions of all steps."""
    given_directly: int = 0
    """Steps that the hop before has sent, and not the client."""
    pushed: int = 0
    """Results that were sent to the hop after."""
    former_busy_us: int = 0
    """For how long workers that are gone have run their executors."""


@dataclass(slots=True, eq=False)
class ServedSpan:
    """One worker, from when its blocks are loaded until it is lost or dropped.

    A session belongs to the one that it was opened with, and has no KV after it.
    """

    worker: Worker
    admission: Admission
    adapters: AdapterStore
    model: ModelInfo
    policy: ServePolicy
    network: Network
    """It signs receipts."""
    next_hops: NextHops
    desk: PushDesk
    tally: ServeStats
    work_turns: WorkTurns
    conduct: Conduct
    leased: LeasedKv
    """The sessions of the server that wait for their clients."""
    passes: int = 0
    """The passes that are under way."""

    def use(self, adapter: bytes | None, span: Span) -> AdapterInUse | None:
        """The adapter that a client names for the blocks of `span`, for its session or pass to release.

        None if these blocks compute as they are. Raises PeerRefused if the client is to bring the adapter.
        """
        if adapter is None or adapter == self.model.adapter:
            return None
        return self.adapters.use(AdapterId(adapter), span)
