"""The terms of a session, fixed before it opens, and the tools that it may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.wire.payload import HiddenForm

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.receipts.book import ReceiptBook
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.spot_checks import SpotChecks
    from llmnode.wire.payload import Codec


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """The model, the number of positions that there is KV for, and how hidden states cross the wire."""

    model: ModelInfo
    max_length: int
    codec: Codec
    policy: ClientPolicy

    @property
    def form(self) -> HiddenForm:
        """The form of hidden states on the wire."""
        return HiddenForm(self.model.hidden_size, self.codec)


@dataclass(frozen=True, slots=True)
class SessionTools:
    """The tools that a session has beside its hops. Each may be missing."""

    finder: PeerFinder | None = None
    """Finds other peers. Without it, a session ends with the first peer that it loses."""
    book: ReceiptBook | None = None
    """Keeps receipts. Without it, nobody knows later which peer computed what."""
    spot_checks: SpotChecks | None = None
    """Has some chunks computed twice."""
