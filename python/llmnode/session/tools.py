"""The tools that a session may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.receipts.book import ReceiptBook
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.spot_checks import SpotChecks


@dataclass(frozen=True, slots=True)
class SessionTools:
    """The tools that a session has beside its hops. Each may be missing."""

    finder: PeerFinder | None = None
    """Finds other peers. Without it, a session ends with the first peer that it loses."""
    book: ReceiptBook | None = None
    """Keeps receipts. Without it, nobody knows later which peer computed what."""
    spot_checks: SpotChecks | None = None
    """Has some chunks computed twice."""
