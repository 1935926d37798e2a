"""Malformed frames, and steps that nobody asked for, cost the link that they come over: a few may be a bug, or late.
Probes beyond a rate are refused.

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
    """The malformed and unasked frames that a node has received."""

    def __init__(self, policy: ServePolicy) -> None:
        self._malformed = Rates(policy.malformed_burst, policy.malformed_per_s)
        self._unasked = Rates(policy.unasked_burst, policy.unasked_per_s)
        self._probes = Rates(policy.probes_burst, policy.probes_per_s)
        self.probe_bytes = policy.probe_bytes

    async def note_malformed(self, link: Link) -> None:
        """A frame of this link was malformed. The link ends if there were too many."""
        if not self._malformed.take(link.group, trio.current_time()):
            await link.end("too many malformed frames")

    def take_probe(self, link: Link) -> float | None:
        """A probe came over this link. None if it may be answered, else the seconds until one may be."""
        now_s = trio.current_time()
        return None if self._probes.take(link.group, now_s) else self._probes.wait_s(link.group, now_s)

    async def note_unasked(self, link: Link) -> None:
        """A step of this link is for no session that takes it. The link ends if there were too many."""
        if not self._unasked.take(link.group, trio.current_time()):
            await link.end("too many steps that nobody asked for")
