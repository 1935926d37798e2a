"""Malformed frames cost the link that they come over: a few may be a bug of the peer, many are an attack.

They count for the address group that they come from: identities and links are free. A peer that sends none keeps its
links, whatever others of its group do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.rates import Rates

if TYPE_CHECKING:
    from llmnode.core.policy import ServePolicy
    from llmnode.ports import Link


class Conduct:
    """The malformed frames that a node has received."""

    def __init__(self, policy: ServePolicy) -> None:
        self._rates = Rates(policy.malformed_burst, policy.malformed_per_s)

    async def note_malformed(self, link: Link) -> None:
        """A frame of this link was malformed. The link ends if there were too many."""
        if not self._rates.take(link.group, trio.current_time()):
            await link.end("too many malformed frames")
