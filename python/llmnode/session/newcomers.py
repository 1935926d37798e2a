"""Servers that have not proved themselves to a client: they are tried, and then believed for a share of its sessions.

A session goes to a newcomer only once that has computed something in a trial, if there is a way without it. One that
hangs then costs no session anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.route import covers
from llmnode.core.span import Span

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.peers.standing import Standing
    from llmnode.core.policy import ClientPolicy
    from llmnode.session.trials import Trials
    from llmnode.swarm.peer_connection import PeerConnection


class Newcomers:
    """For one client, with the `standing` of its servers and its `trials`."""

    def __init__(
        self, blocks: int, policy: ClientPolicy, standing: Standing, trials: Trials, rng: random.Random
    ) -> None:
        self._whole = Span(0, blocks)
        self._policy = policy
        self._standing = standing
        self._trials = trials
        self._rng = rng
        self._tries_again = trio.Lock()

    def has_served(self, server: Announcement, now_s: float) -> bool:
        """Whether it has proved itself, or has computed in a trial lately."""
        return self._standing.is_proven(server.peer, now_s) or self._trials.has_computed(server.peer, now_s)

    def try_all(self, servers: Sequence[Announcement]) -> None:
        """Begin to try those that have not proved themselves: others may fail like the last one."""
        now_s = trio.current_time()
        self._trials.begin([each for each in servers if not self._standing.is_proven(each.peer, now_s)])

    async def try_again(
        self, span: Span, servers: Sequence[Announcement], living: Sequence[PeerConnection], since_s: float
    ) -> Collection[PeerId]:
        """Have those that have served before compute a position, until some have since then that cover `span`.

        Those of which a `living` connection has had a result since then need not. Returns those that have computed
        none.
        """
        async with self._tries_again:  # other sessions that wait for the same server need not try the same ones
            now_s = trio.current_time()
            served = [each for each in servers if each.offer.span.meets(span) and self.has_served(each, now_s)]
            fresh = {each.peer for each in living if each.computed_s >= since_s}
            stale = [each for each in served if each.peer not in fresh]
            await self._trials.again(span, stale, [each.offer.span for each in served if each.peer in fresh], since_s)
        return {each.peer for each in stale if not self._trials.has_computed_since(each.peer, since_s)}

    async def wait(self, span: Span, servers: Sequence[Announcement], avoid: Collection[PeerId]) -> None:
        """If servers are being tried, until some of `servers` that have served cover `span` without those to avoid."""
        now_s = trio.current_time()
        served = [each for each in servers if each.peer not in avoid and self.has_served(each, now_s)]
        await self._trials.wait(span, [each.offer.span for each in served], avoid)

    async def explore(self, servers: Sequence[Announcement]) -> Collection[PeerId]:
        """For a share of sessions: the peers that are believed, since they have computed in a trial.

        If others serve well, some newcomers are tried now, and the session waits for the first of them, for a moment.
        """
        if self._rng.random() >= self._policy.standing.explored_share:
            return ()
        now_s, trials = trio.current_time(), self._policy.trials
        proven = [each.offer.span for each in servers if self._standing.is_proven(each.peer, now_s)]
        if covers(proven, self._whole):
            self._trials.begin([each for each in servers if not self.has_served(each, now_s)], trials.explored)
            with trio.move_on_after(trials.explored_s):
                await self._trials.wait(self._whole, [], [])
        now_s = trio.current_time()
        return {each.peer for each in servers if self._trials.has_computed(each.peer, now_s)}
