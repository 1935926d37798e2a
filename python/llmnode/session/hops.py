"""The hops of a session in order, and where they all stand: opened, told of each other, brought to one position.

What the session does with them is in `session.py`; how one that is lost is replaced, in `mending.py`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import Epoch, Step
from llmnode.errors import ConfigError, LocalProtocolError, PeerUnreachable, SessionClosed, single_error
from llmnode.session.chunk_run import run_chunks
from llmnode.session.hop import SessionHop
from llmnode.session.relay_gate import RelayGate
from llmnode.wire.chunk import Chunk
from llmnode.wire.payload import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route
    from llmnode.errors import LlmnodeError
    from llmnode.session.chunk_run import ChunkResult
    from llmnode.session.terms import SessionTerms
    from llmnode.session.tools import SessionTools
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.frame import Buffer
    from llmnode.wire.log import PayloadLog

log = logging.getLogger(__name__)


class SessionHops:
    """All hops stand at `position` in `epoch`, if it `is_settled`; else `settle` brings them there."""

    def __init__(
        self,
        terms: SessionTerms,
        tools: SessionTools,
    ) -> None:
        """The book and the spot checks of `tools` go back with the hops."""
        self.terms = terms
        self.tools = tools
        self.form = terms.form
        self.policy = terms.policy
        self.hops: list[SessionHop] = []
        self.position = 0
        self.epoch = Epoch(0)
        self.step = Step(0)
        self.is_settled = True
        self.ended: LlmnodeError | None = None
        """Why nothing more can be done with it."""
        self._relayed = RelayGate(terms.policy.relayed)

    @property
    def lost(self) -> SessionHop | None:
        """The first that has failed: it has what the next one was given."""
        return next((hop for hop in self.hops if hop.failure is not None), None)

    def check_open(self) -> None:
        """Raises SessionClosed."""
        if self.ended is not None:
            raise SessionClosed(f"the session has ended: {self.ended}")

    def begin_epoch(self) -> Epoch:
        self.epoch = Epoch(self.epoch + 1)
        return self.epoch

    def chunk(self, step: int, start: int, length: int) -> Chunk:
        return Chunk(self.epoch, Step(step), start, length)

    async def open(self, route: Route, connections: Mapping[PeerId, PeerConnection]) -> None:
        """Raises the PeerError of a hop that does not open; then none is left open."""
        self.hops = await self._open_hops(route, connections, [None])

    async def line_up(self) -> None:
        """Tell every hop its neighbours."""
        await self._tell([None, *self.hops, None])

    async def settle(self) -> None:
        """Have all hops stand at the line's position, in one epoch, and know their neighbours. Raises PeerError."""
        if not self.is_settled:
            self.begin_epoch()
            if self.tools.book is not None:
                self.tools.book.truncate(self.position)
            if self.tools.spot_checks is not None:
                self.tools.spot_checks.truncate(self.position)
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in self.hops:
                        nursery.start_soon(hop.align, self.epoch, self.step, self.position)
            await self.line_up()
            self.is_settled = True

    async def switch_to_direct(self) -> None:
        """Have hops that were reached through relays go on over direct connections, and those that could not push be
        asked again, from time to time. Nothing is under way.

        Raises the PeerError of a hop that is lost by that.
        """
        if self.tools.spot_checks is None or not self.tools.spot_checks.is_busy:  # a check asks over what it found
            await self._move(self.hops, self.step, self.position)
        if any(hop.pushing.has_failed for hop in self.hops):
            await self.line_up()

    async def become(self, source: SessionHops) -> None:
        """Be a copy of `source`, at its peers, but for who does not copy itself: that is a `failure` of the hop.

        Its hops do not know their neighbours yet.
        """
        position = source.position
        if (source.terms.model, source.form) != (self.terms.model, self.form) or position > self.terms.max_length:
            raise LocalProtocolError(f"no room for {position} positions of another session, or of another form")
        hops = [hop.beside(self.hops) for hop in source.hops]
        shared = min(self.position, position, self.hops[0].inputs.shared_with(source.hops[0].inputs))
        if self.is_settled and hops == self.hops and shared == self.position == position:
            return
        await self.abandon([hop for hop in self.hops if hop not in hops])
        self.hops, self.position, self.is_settled = hops, position, True
        self.begin_epoch()  # of those that are opened
        at = self.begin_epoch(), self.step, position
        if self.tools.book is not None:
            self.tools.book.become(source.tools.book, position)
        if self.tools.spot_checks is not None:
            self.tools.spot_checks.truncate(0)  # what is being checked has gone
        with single_error():
            async with trio.open_nursery() as nursery:
                for hop, other in zip(hops, source.hops, strict=True):
                    nursery.start_soon(hop.become, other, shared, *at)
        if self.ended is not None:  # nobody else would close those that were opened since
            await self.abandon(hops)
            self.check_open()

    async def rebuild(
        self, lost: SessionHop, route: Route, connections: Mapping[PeerId, PeerConnection]
    ) -> list[SessionHop]:
        """Put new hops in the place of `lost`, that have computed what it was given; returns them. Raises PeerError.

        In an epoch of their own, so that what they are given by mistake or too late is never taken for something else.
        """
        index = self.hops.index(lost)
        until_lost = [None, *self.hops[:index]]
        epoch = self.begin_epoch()
        hops = await self._open_hops(
            route, connections, until_lost[-2:] if self.policy.recovery.upstream_logs else [], quiet=True
        )
        try:
            await self._hold_replay(until_lost[-1], hops)
            flights: list[ChunkResult] = []

            async def land(flight: ChunkResult) -> None:
                self._log(flight, hops, until_lost[-1])
                flights.append(flight)

            await run_chunks(hops, self._replays(epoch, until_lost[-1], lost.inputs), self.policy, land)
            for flight in flights:  # of a replay that was given up, nothing is kept
                await self._take_receipts(flight, hops, replay=True)
            self.check_open()  # nobody would close these
        except BaseException:
            await self.abandon(hops)
            raise
        self.hops[index : index + 1] = hops
        return hops

    async def hold_from_relays(self, chain: Sequence[SessionHop | None], positions: int) -> None:
        """Wait with so many positions that are to go along `chain`, where None is us, see `holding.py`.

        Raises ConfigError.
        """
        size_bytes = payload_bytes(self.terms.codec, positions * self.terms.model.hidden_size)
        await self._relayed.pass_when_allowed(chain, positions, size_bytes)

    async def land(self, flight: ChunkResult) -> None:
        """All hops have computed the chunk: the line stands after it now. Raises as `_take_receipts` does."""
        await self._take_receipts(flight, self.hops, replay=False)
        self._log(flight, self.hops, None)
        self.position += flight.chunk.length
        self.step = Step(self.step + 1)

    async def abandon(self, hops: Sequence[SessionHop]) -> None:
        with trio.move_on_after(self.policy.open_timeout_s, shield=True):
            for hop in hops:
                await hop.close()

    async def _hold_replay(self, before: SessionHop | None, hops: Sequence[SessionHop]) -> None:
        """Before all positions go through new `hops`, which stand at their first. Raises PeerError."""
        try:
            await self.hold_from_relays([before if self.policy.recovery.upstream_logs else None, *hops], self.position)
        except ConfigError as error:  # of the way there: others may be nearer
            log.warning("%s", error)
            relayed = next((hop for hop in hops if hop.connection.best.relayed), hops[0])
            raise PeerUnreachable(str(error), peer=relayed.hop.peer, span=relayed.hop.span) from error
        await self._move(hops, Step(0), 0)

    async def _move(self, hops: Sequence[SessionHop], step: Step, position: int) -> None:
        """Have those that there is a direct connection to by now go on over it. Raises PeerError."""
        if moving := [hop for hop in hops if hop.has_better_way]:
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in moving:
                        nursery.start_soon(hop.take_better_way, self.epoch, step, position)

    async def _open_hops(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        before: Sequence[SessionHop | None],
        *,
        quiet: bool = False,
    ) -> list[SessionHop]:
        """Tell them, and the last of `before`, their neighbours too: of new ones that takes no time of its own.

        Nobody is told anything if there is nothing `before`. `quiet` is as in `_tell`. Raises the PeerError of one that
        does not open, or the failure of the one before; then none is left open.
        """
        hops = [SessionHop(hop, connections[hop.peer], self.terms) for hop in route]
        try:
            if before:
                await self._tell([*before, *hops, None], opening=hops, quiet=quiet)
            else:
                with single_error():
                    async with trio.open_nursery() as nursery:
                        for hop in hops:
                            nursery.start_soon(hop.open, self.epoch)
        except BaseException:
            await self.abandon(hops)
            raise
        return hops

    async def _tell(
        self, chain: Sequence[SessionHop | None], *, opening: Sequence[SessionHop] = (), quiet: bool = False
    ) -> None:
        """Tell each hop of `chain`, except its ends, its neighbours, and have those that are `opening` open with that.

        `quiet`: nobody wants what the last puts out.
        """
        step = Step(self.step + 1)  # 0 is what an OPEN is asked at

        async def tell(before: SessionHop | None, hop: SessionHop, after: SessionHop | None) -> None:
            is_quiet = quiet and after is None
            if not self.policy.push.enabled:
                before = after = None
            introduce = self.tools.finder.introduce if self.tools.finder is not None else None
            place = before, after, self.epoch, step
            stand = partial(hop.set_neighbours, *place, quiet=is_quiet, introduce=introduce)
            if hop in opening:
                await hop.open(self.epoch, stand)
            else:
                await stand()

        with single_error():
            async with trio.open_nursery() as nursery:
                for before, hop, after in zip(chain, chain[1:], chain[2:], strict=False):
                    if hop is not None:
                        nursery.start_soon(tell, before, hop, after)

    def _replays(
        self, epoch: Epoch, before: SessionHop | None, logged: PayloadLog
    ) -> Iterator[tuple[Chunk, Buffer | SessionHop]]:
        """All positions of the session in chunks of `epoch`, and for each who has it, or the payload."""
        most = self.policy.chunk_tokens
        origins: Iterable[tuple[Buffer | SessionHop, int]] = logged.chunks(most)
        if before is not None and self.policy.recovery.upstream_logs:
            origins = ((before, min(most, self.position - start)) for start in range(0, self.position, most))
        start = 0
        for step, (origin, length) in enumerate(origins):
            yield Chunk(epoch, Step(step), start, length), origin
            start += length

    def _log(self, flight: ChunkResult, hops: Sequence[SessionHop], before: SessionHop | None) -> None:
        """Keep what `hops` were given, as far as the hop before each does not."""
        for hop, hidden in zip(hops, flight.inputs, strict=True):
            if before is None or not self.policy.recovery.upstream_logs:
                assert hidden.payload is not None
                hop.inputs.append(hidden.payload, flight.chunk.length)
            before = hop

    async def _take_receipts(self, flight: ChunkResult, hops: Sequence[SessionHop], *, replay: bool) -> None:
        """Raises IntegrityError, the `failure` of its hop, if it must be sure of their signatures and one is bad."""
        if (book := self.tools.book) is None:
            return
        receipts = [hop.receipt(book, flight.chunk, each.said) for hop, each in zip(hops, flight.outputs, strict=True)]
        if self.policy.trust.strict:
            for hop, receipt in zip(hops, receipts, strict=True):
                with hop.blamed():
                    await book.check([receipt])
        given, got = flight.inputs[0].digest, flight.output.digest
        book.add(receipts, given, got, replay=replay, verified=self.policy.trust.strict)
