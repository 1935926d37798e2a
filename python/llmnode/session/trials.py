"""Several servers are tried at once after one has failed: each computes one position, and those that do are preferred.

A stranger can have any number of servers that take sessions and do not serve them. Without trials a client would meet
them one after the other. A server that computes the position and then serves nothing costs no more than without.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import Epoch, Step
from llmnode.core.route import Hop, covers
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerTimeout, PeerUnreachable, single_error
from llmnode.session.chunk_run import run_chunk
from llmnode.session.hop import SessionHop
from llmnode.wire.chunk import Chunk
from llmnode.wire.payload import Codec
from llmnode.wire.session_state import SessionState
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.session.reaching import Reaching
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.chunk_path import ChunkResult

log = logging.getLogger(__name__)


class Trials:
    """For one client. `served` is told of each server that has computed its position, `failed` of what others did.

    A server that is only slow, or has no free KV, has not failed.
    """

    def __init__(
        self,
        model: ModelInfo,
        policy: ClientPolicy,
        reaching: Reaching,
        served: Callable[[ChunkResult], None],
        failed: Callable[[PeerError], None],
    ) -> None:
        self._terms = SessionTerms(model, 1, Codec.RAW, policy)
        self._policy = policy.trials
        self._reaching = reaching
        self._served = served
        self._failed = failed
        self._began_s: dict[PeerId, float] = {}
        self._computed: dict[PeerId, Span] = {}
        """The latest span of each that has computed."""
        self._waiting: list[Announcement] = []
        self.is_running = False
        self._changed = trio.Event()
        self._longest_wait_s = policy.trials.moment_s * policy.trials.most / policy.trials.at_once

    def has_computed(self, peer: PeerId, now_s: float) -> bool:
        """Whether the peer has computed a position, not too long ago, and has not failed since."""
        return peer in self._computed and now_s < self._began_s[peer] + self._policy.keeps_s

    def has_computed_since(self, peer: PeerId, since_s: float) -> bool:
        """The same, in a trial that began since then."""
        return peer in self._computed and self._began_s[peer] >= since_s

    def note_failed(self, peer: PeerId) -> None:
        """It is not preferred any more."""
        self._computed.pop(peer, None)

    def begin(self, announced: Sequence[Announcement], most: int | None = None) -> None:
        """Try the servers that were not tried lately, in tasks: in this order, but address groups have turns.

        At most this number of them, by default as many as after a failure (`TrialPolicy`).
        """
        now_s = trio.current_time()
        self._began_s = {peer: at_s for peer, at_s in self._began_s.items() if now_s < at_s + self._policy.keeps_s}
        self._computed = {peer: span for peer, span in self._computed.items() if peer in self._began_s}
        fresh = [each for each in _usable(announced) if each.peer not in self._began_s]
        if fresh and not self.is_running:  # what fails meanwhile begins no others, or hostile servers could go on so
            self._waiting = self._reaching.in_turns(fresh)[: self._policy.most if most is None else most]
            self.is_running = True
            self._reaching.start_soon(self._run)

    async def wait(self, span: Span, proven: Sequence[Span], avoid: Collection[PeerId]) -> None:
        """While servers are tried, until those that have computed cover `span`, together with the `proven` ones.

        Those to `avoid` do not count. It ends after the moments in which as many as `TrialPolicy.most` are tried.
        """
        with trio.move_on_after(self._longest_wait_s):
            while self.is_running:
                computed = (each for peer, each in self._computed.items() if peer not in avoid)
                if covers([*proven, *computed], span):
                    return
                await self._changed.wait()

    async def again(
        self, span: Span, announced: Sequence[Announcement], proven: Sequence[Span], since_s: float
    ) -> None:
        """Try servers though that was done before, and wait until those that have computed since then cover `span`,
        together with the `proven` ones.

        Those that were tried since then are left out. It tries `TrialPolicy.at_once` others at most, and waits no
        longer than `wait`.
        """
        stale = [each for each in _usable(announced) if self._began_s.get(each.peer, -math.inf) < since_s]
        chosen = self._reaching.in_turns(stale)[: self._policy.at_once]
        running = {each.peer for each in chosen}
        for each in chosen:
            self._computed.pop(each.peer, None)
            self._began_s[each.peer] = trio.current_time()
            self._reaching.start_soon(partial(self._try, each, running))
        with trio.move_on_after(self._longest_wait_s):
            while running:
                computed = [each for peer, each in self._computed.items() if self._began_s[peer] >= since_s]
                if covers([*proven, *computed], span):
                    return
                await self._changed.wait()

    async def _run(self) -> None:
        """Try some at once, and after a moment some more, until a whole route has computed."""
        try:
            while self._waiting and not covers(self._computed.values(), Span(0, self._terms.model.blocks)):
                batch, self._waiting = self._waiting[: self._policy.at_once], self._waiting[self._policy.at_once :]
                running = {each.peer for each in batch}
                for each in batch:
                    self._began_s[each.peer] = trio.current_time()
                    self._reaching.start_soon(partial(self._try, each, running))
                with trio.move_on_after(self._policy.moment_s):
                    while running and not covers(self._computed.values(), Span(0, self._terms.model.blocks)):
                        await self._changed.wait()
        finally:
            self.is_running = False
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _try(self, announcement: Announcement, running: set[PeerId]) -> None:
        peer = announcement.peer
        try:
            with suppress(PeerError):  # `Reaching` counts it
                connection = await self._reaching.reach(announcement, keeps=False)
                try:
                    await self._judge(announcement, connection)
                    running.discard(peer)
                    self._note_change()
                    if peer in self._computed:  # it may be used soon
                        await trio.sleep(self._policy.keeps_s)
                finally:
                    await self._reaching.release(connection)
        finally:
            running.discard(peer)
            self._note_change()

    async def _judge(self, announcement: Announcement, connection: PeerConnection) -> None:
        peer = announcement.peer
        try:
            with trio.fail_after(self._policy.timeout_s), single_error():
                result = await self._compute(announcement, connection)
        except (PeerTimeout, PeerUnreachable, trio.TooSlowError) as error:
            log.info("peer=%s has computed nothing in a trial: %s", peer, error)
        except PeerError as error:
            self._failed(error.blame(peer, announcement.offer.span))
        else:
            self._computed[peer] = announcement.offer.span
            self._served(result)

    async def _compute(self, announcement: Announcement, connection: PeerConnection) -> ChunkResult:
        """One position of zeros, in a session of its own. Raises PeerError."""
        terms = self._terms
        hop = SessionHop(Hop(announcement.peer, announcement.offer.span), connection, terms)
        payload = bytes(terms.form.encode(bytes(terms.model.row_bytes)))
        try:
            for each, requests in SessionState[SessionHop](terms).open([hop], [None], trio.current_time()):
                await each.carry_out(*requests)
            return await run_chunk([hop], Chunk(Epoch(0), Step(0), 0, 1), payload, terms.policy)
        finally:
            with trio.move_on_after(terms.policy.open_timeout_s, shield=True):
                await hop.close()


def _usable(announced: Sequence[Announcement]) -> list[Announcement]:
    """Those that say where they are, and that they have KV."""
    return [each for each in announced if each.addresses and each.offer.kv_tokens_free]
