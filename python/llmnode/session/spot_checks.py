"""Spot checks: a small share of chunks is computed again by another peer of the same profile, and compared.

A receipt proves which peer said something. Only a second computation tells whether it is right. One
hop of a chunk that all hops have computed is chosen at random. Another peer gets the inputs of that hop, from position
0, and its output for the chunk is compared with the output that the hop has signed. If they differ, a third peer
decides: two against one. The three come from different address groups, if there are such. Two of one group do not
convict a peer of another one: all three are suspected.

All this goes beside the session's steps, over sessions of its own, one check at a time. It costs the checker a prefill,
and the client the transfer of the hop's inputs and of the checker's output. The checker sees hidden states that
otherwise only the route sees. Peers that lie together, and alike, are not found. A span that only one peer holds whole
is not checked.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.errors import IntegrityError, PeerError, SessionLost
from llmnode.session.hop import SessionHop
from llmnode.session.recompute import Recomputer, Sample, tolerance

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.receipts.book import ReceiptBook, Run
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.recompute import Exhibit, Opinion
    from llmnode.wire.chunk_path import ChunkResult
    from llmnode.wire.session_terms import SessionTerms

log = logging.getLogger(__name__)


class SpotChecks:
    """The checks of one session. `start_soon` starts a task; `run` runs long computations off the event loop.

    A peer that computes something else than two others is not used any more by this client, and the session ends with
    SessionLost. Others could compute the chunk anew, but nobody knows which chunk was the first wrong one. Tokens were
    chosen by it, and shown: only the caller can take them back. If no third peer decides, all peers that differ are
    suspected, and the session goes on.
    """

    def __init__(
        self,
        terms: SessionTerms,
        others: PeerFinder,
        book: ReceiptBook,
        rng: random.Random,
        start_soon: Callable[[Callable[[], Awaitable[None]]], None],
        run: Run = trio.to_thread.run_sync,
    ) -> None:
        self.passed = 0
        self.undecided = 0
        """Checks that found a difference, but not the peer at fault."""
        self.given_up = 0
        """Checks for which no peer could be asked, or a log was not shown."""
        self.largest_deviation = 0.0
        """The largest deviation of two peers that count as agreeing."""
        self._recomputer = Recomputer(terms, others, book, run)
        self._policy = terms.policy
        asked_for = self._policy.spot_checks.tolerance
        self._tolerance = tolerance(terms.model.precision, terms.codec) if asked_for is None else asked_for
        self._others = others
        self._rng = rng
        self._start_soon = start_soon
        self._finding: IntegrityError | None = None
        self._is_open = True
        self._end = 0  # of the chunk that is being checked
        self._scope = trio.CancelScope()
        self._over = trio.Event()
        self._over.set()

    def consider(self, result: ChunkResult, hops: Sequence[SessionHop]) -> None:
        """All `hops` have computed the chunk of `result`, and stand after it. It may be checked; returns at once."""
        end = result.chunk.start + result.chunk.length
        if not (self._is_open and self._over.is_set() and self._finding is None and self._recomputer.can_cut):
            return
        if end > self._policy.spot_checks.positions or self._rng.random() >= self._policy.spot_checks.share:
            return
        index = self._rng.randrange(len(hops))
        hop = hops[index]
        origin = hops[index - 1] if index and self._policy.recovery.upstream_logs else hop.inputs.copy()
        sample = Sample(result.chunk, origin, hop, result.outputs[index].hidden)
        self._end, self._scope, self._over = end, trio.CancelScope(), trio.Event()
        self._start_soon(partial(self._check, sample))

    @property
    def is_busy(self) -> bool:
        """Whether a check is under way."""
        return not self._over.is_set()

    def truncate(self, position: int) -> None:
        """Positions from `position` on are void: no hop has to have them any more."""
        if position < self._end:
            self._scope.cancel()

    def raise_finding(self) -> None:
        """Raises SessionLost if a hop was found to compute something else than others."""
        if self._finding is not None:
            raise SessionLost([self._finding])

    async def finish(self) -> None:
        """Wait for the check that is under way: closing gives it up. Raises SessionLost as the next step would."""
        await self._over.wait()
        self.raise_finding()

    async def close(self) -> None:
        """Give up the check that is under way, and free what it holds elsewhere."""
        self._is_open = False
        self._scope.cancel()
        await self._over.wait()

    async def _check(self, sample: Sample) -> None:
        try:
            with self._scope:
                await trio.lowlevel.checkpoint()  # it may have been given up before it began
                await self._compare(await self._recomputer.collect(sample))
        except PeerError as error:  # the failure of its hop, which the session replaces
            log.warning("no spot check: %s", error)
            self.given_up += 1
        finally:
            self._over.set()

    async def _compare(self, exhibit: Exhibit) -> None:
        own, asked = exhibit.own, {exhibit.own.peer}
        second = await self._recomputer.ask(exhibit, asked, [own])
        if second is None:
            log.info("no spot check span=%s: nobody else computes it now", exhibit.span)
            self.given_up += 1
        elif await self._agree(own, second):
            self.passed += 1
        else:
            log.warning("%s and %s do not compute the same, span=%s", own.peer, second.peer, exhibit.span)
            third = await self._recomputer.ask(exhibit, asked, [own, second])
            if third is None:
                self._suspect(exhibit, [second])
                return
            with_own, with_second = await self._agree(own, third), await self._agree(second, third)
            alike, other = ([own, third], second) if with_own else ([second, third], own)
            if with_own == with_second or _are_one_voice(alike, other):
                self._suspect(exhibit, [second, third])
            elif with_own:
                self.passed += 1
                self._outvote(second.peer, [own, third])
            elif exhibit.is_proved:
                self._outvote(own.peer, [second, third])
                what = f"computed something else than {second.peer} and {third.peer}"
                self._finding = IntegrityError(what, peer=own.peer, span=exhibit.span)
            else:  # the inputs that we were shown may not be what it was given
                suspects = self._suspect(exhibit, [])
                what = f"{second.peer} and {third.peer} compute otherwise than {_names(suspects)}"
                self._finding = IntegrityError(what, span=exhibit.span, suspects=suspects)

    async def _agree(self, one: Opinion, other: Opinion) -> bool:
        apart = await self._recomputer.deviation(one, other)
        log.debug("spot check: %s and %s are %.2g apart", one.peer, other.peer, apart)
        if apart > self._tolerance:
            return False
        self.largest_deviation = max(self.largest_deviation, apart)
        return True

    def _outvote(self, peer: PeerId, others: Sequence[Opinion]) -> None:
        log.warning("peer=%s is not used any more: %s compute otherwise", peer, _names(each.peer for each in others))
        self._others.distrust(peer)

    def _suspect(self, exhibit: Exhibit, others: Sequence[Opinion]) -> list[PeerId]:
        """Suspect the checked peer, `others`, and, if the input is not proved, the hop before. Returns all of them."""
        suspects = [exhibit.own.peer, *(each.peer for each in others)]
        if not exhibit.is_proved and isinstance(exhibit.sample.origin, SessionHop):
            suspects.append(exhibit.sample.origin.hop.peer)
        log.warning("one of %s computes wrongly, and nobody decides who: all are suspected", _names(suspects))
        self.undecided += 1
        self._others.suspect(suspects)
        return suspects


def _are_one_voice(alike: Sequence[Opinion], other: Opinion) -> bool:
    """Whether those that agree may be one stranger: they are in one address group, and `other` is in another one."""
    groups = {each.group for each in alike}
    return len(groups) == 1 and other.group not in groups


def _names(peers: Iterable[PeerId]) -> str:
    return " and ".join(peers)
