"""Malformed frames, and steps that nobody asked for, cost the link that they come over: a few may be a bug, or late.
Probes beyond a rate are refused, and other requests wait for their turn.

They count for the address group that they come from: identities and links are free. A peer that sends none keeps its
links, whatever others of its group do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from llmnode.core.budget import Resource
from llmnode.core.rates import Rates
from llmnode.errors import PeerRefused
from llmnode.net.turns import Turns
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmnode.core.policy import ServePolicy
    from llmnode.ports import Link
    from llmnode.wire.frame import Frame


COUNTED_BYTES = 1 << 14
"""A request of this size counts as one more: it is parsed. So does one with an answer of this size."""
ANSWERED_BYTES = 1 << 18
"""An answer about a view counts as one more request for each part of this size. The question may have one byte, and
the answer two megabytes."""
COUNTED_POSITIONS = 64
"""One that asks for results of this number of positions too: they are read and sent."""
COUNTED_OPEN = 3.0
"""A session that opens counts as this many more: it waits for KV, and the server looks which others may go for it."""

OPENINGS = frozenset({FrameType.OPEN, FrameType.NEIGHBOURS, FrameType.CLOSE})
"""A session opens and ends with these."""

NO_MEMORY_S = 0.25
"""A request that there is no memory for is refused after this time. Meanwhile no other frame of its link is read: a
stranger that has used up its memory could have requests without end refused.
"""

LOOK_S = 0.1
"""The server looks this often which groups have work: it may have thousands of sessions."""

MOST_COUNTED = 64.0
"""No request counts as more: all other groups wait meanwhile, and a length is a claim."""


class Conduct:
    """The malformed and unasked frames that a node has received."""

    def __init__(self, policy: ServePolicy, at_work: Callable[[float], Iterable[str]] | None = None) -> None:
        """`at_work` gives the address groups that have had work computed since a time. It is None for a node without
        blocks, which opens no sessions.
        """
        self._malformed = Rates(policy.malformed_burst, policy.malformed_per_s)
        self._unasked = Rates(policy.unasked_burst, policy.unasked_per_s)
        self._probes = Rates(policy.probes_burst, policy.probes_per_s)
        self._requests = Turns(policy.requests)
        self._openings = Turns(policy.openings)
        self._wants = Turns(policy.wants)
        self._at_work, self._others_work_s = at_work, policy.others_work_s
        self._working: set[str] = set()
        self._looked_s = -math.inf
        self._per_step = policy.requests_per_step
        self.probe_bytes = policy.probe_bytes

    async def wait_turn(self, link: Link, frame: Frame, answer_bytes: int = 0) -> None:
        """Until a request may be answered. Its address group has more turns if it has had steps computed.

        The size of the answer counts, if it is known. Raises PeerRefused without memory for a frame that waits.
        """
        path, size_bytes = (link.group, link.peer), frame.size_bytes + answer_bytes
        amount = 1 + size_bytes / COUNTED_BYTES + frame.length / COUNTED_POSITIONS
        amount = min(MOST_COUNTED, amount + COUNTED_OPEN * (frame.type is FrameType.OPEN))
        if not self._requests.take(path, amount):
            is_quick = frame.type in OPENINGS and self._is_free_for(link.group)
            await _wait(self._openings if is_quick else self._requests, link, frame.size_bytes, amount)

    async def wait_answer(self, link: Link, answer: Frame) -> None:
        """Until an answer about our view may be sent. It counts for the address group that has asked.

        Raises as `wait_turn`.
        """
        amount = min(MOST_COUNTED, answer.size_bytes / ANSWERED_BYTES)
        if amount >= 1 and not self._requests.take((link.group, link.peer), amount):
            await _wait(self._requests, link, answer.size_bytes, amount)

    async def wait_want(self, link: Link, frame: Frame, used: int) -> None:
        """Until a question before pushes may be looked at. `used` is how many pushes of this link were used since the
        one before.

        Raises as `wait_turn`.
        """
        self._wants.give_back(link.group, used)
        amount = 1 + frame.size_bytes / COUNTED_BYTES
        if not self._wants.take((link.group, link.peer), amount):
            await _wait(self._wants, link, frame.size_bytes, amount)

    def _is_free_for(self, group: str) -> bool:
        """Whether nothing of other groups is computed, nor was a moment ago."""
        if self._at_work is None:
            return False
        now_s = trio.current_time()
        if self._looked_s + LOOK_S <= now_s:
            self._looked_s, self._working = now_s, {*self._at_work(now_s - self._others_work_s)}
        return self._working <= {group}

    def note_step(self, group: str) -> None:
        """A step of this address group was computed."""
        self._requests.give_back(group, self._per_step)

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


async def _wait(turns: Turns, link: Link, size_bytes: int, amount: float) -> None:
    """Raises PeerRefused without memory for a frame of this size, which waits."""
    if not link.scope.take(Resource.MEMORY, size_bytes):
        await trio.sleep(NO_MEMORY_S)
        raise PeerRefused(RefusalCode.BUSY, "your address has asked for much, and no memory is left meanwhile")
    try:
        await turns.wait((link.group, link.peer), amount)
    finally:
        link.scope.release(Resource.MEMORY, size_bytes)
