"""The hops of a session in order: carries out what the session's state says, and awaits the answers.

The steps of a session are in `session.py`. Other hops replace a lost one in `recovery.py`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import Step
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerRefused, PeerUnreachable, SessionClosed, single_error
from llmnode.session.chunk_run import run_chunks
from llmnode.session.failures import Busier, LetGo
from llmnode.session.hop import SessionHop
from llmnode.session.leaving import Leaving
from llmnode.session.relay_gate import RelayGate
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import payload_bytes
from llmnode.wire.session_state import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.peers.peer_speed import PromisedTime
    from llmnode.core.route import Route
    from llmnode.errors import LlmnodeError
    from llmnode.receipts.book import ReceiptBook
    from llmnode.session.better_routes import Moved
    from llmnode.session.chunk_run import Commit
    from llmnode.session.failures import StepFailures
    from llmnode.session.tools import SessionTools
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.chunk import Chunk
    from llmnode.wire.chunk_path import ChunkResult
    from llmnode.wire.hop_state import HopState, Request
    from llmnode.wire.messages import Result
    from llmnode.wire.receipt import Receipt
    from llmnode.wire.session_terms import SessionTerms

log = logging.getLogger(__name__)


class SessionHops:
    """The book and the spot checks of `tools` go back with the hops."""

    def __init__(self, terms: SessionTerms, tools: SessionTools) -> None:
        self.terms = terms
        self.tools = tools
        self.state: SessionState[SessionHop] = SessionState(terms)
        self.ended: LlmnodeError | None = None
        """Why nothing more can be done with the session."""
        self.is_busy = False
        """A step or the like is under way."""
        self.move: trio.Event | None = None
        """Set when another row has moved this one along. Until then, this one does nothing."""
        self.moves: list[Moved] = []
        self._gate = RelayGate(terms.policy.relayed)
        self._leaving = Leaving(terms, tools)

    @property
    def hops(self) -> Sequence[SessionHop]:
        return self.state.hops

    def check_open(self) -> None:
        """Raises SessionClosed."""
        if self.ended is not None:
            raise SessionClosed(f"the session has ended: {self.ended}")

    async def open(self, route: Route, connections: Mapping[PeerId, PeerConnection]) -> None:
        """Raises the PeerError of a hop that does not open; then none is left open."""
        self.state.hops = await self._open_hops(route, connections, [None])

    async def settle(self) -> None:
        """Have all hops stand at the session's position, in one epoch, and know their neighbours. Raises PeerError."""
        state = self.state
        if not state.is_settled:
            requests = state.settle(trio.current_time())
            if self.tools.book is not None:
                self.tools.book.truncate(state.position)
            if self.tools.spot_checks is not None:
                self.tools.spot_checks.truncate(state.position)
            await self._carry_out(requests)
            await self.tell_neighbours()
            state.settled()

    async def tell_neighbours(self) -> None:
        """Tell every hop its neighbours."""
        await self._carry_out(self.state.tell_neighbours(trio.current_time()))

    async def switch_to_direct(self) -> None:
        """Have hops that were reached through relays go on over direct connections, and those that could not push be
        asked again, from time to time. Nothing is under way.

        Raises the PeerError of a hop that is lost by that.
        """
        if self.tools.spot_checks is None or not self.tools.spot_checks.is_busy:  # a check asks over what it found
            await self._move(self.hops, self.state.step, self.state.position)
        if any(hop.pushing.has_failed for hop in self.hops):
            await self.tell_neighbours()

    async def leave_outdone(self) -> None:
        """Raises Outdone, the failure of a hop that others outdo by far. Nothing is under way."""
        await self._leaving.leave_outdone(self.hops, self.state.position)

    async def copy_from(self, source: SessionHops) -> None:
        """Be a copy of `source`, at its peers. A hop that does not make the copy is lost.

        The hops do not know their neighbours yet.
        """
        state, position = self.state, source.state.position
        hops = [hop.reuse_or_new(self.hops) for hop in source.hops]
        shared = state.shared_with(source.state, hops)
        if state.is_copy(source.state, hops, shared):
            return
        await self.abandon([hop for hop in self.hops if hop not in hops])
        requests = state.copy(source.state, hops, shared)
        if self.tools.book is not None:
            self.tools.book.become(source.tools.book, position)
        if self.tools.spot_checks is not None:
            self.tools.spot_checks.truncate(0)  # the chunk that is being checked is gone
        with single_error():
            async with trio.open_nursery() as nursery:
                for hop, opened, request in requests:
                    nursery.start_soon(hop.become_copy, opened, request)
        if self.ended is not None:  # nobody else would close those that were opened since
            await self.abandon(hops)
            self.check_open()

    async def rebuild(
        self,
        lost: SessionHop,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        failures: StepFailures,
        is_outdone: Callable[[], bool],
    ) -> Sequence[SessionHop]:
        """Put new hops in the place of `lost`, which have computed its inputs; returns them. Raises PeerError."""
        hops = await self.replayed(lost, route, connections, failures, is_outdone)
        self.state.replace([lost], hops)
        return hops

    async def replayed(
        self,
        first: SessionHop,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        failures: StepFailures,
        is_outdone: Callable[[], bool] | None = None,
    ) -> Sequence[SessionHop]:
        """New hops that have computed the inputs of `first`, lost or not, and are in no place yet. Raises PeerError,
        which is Busier if others are better by what servers have said when the new hops are open.

        They do so in an epoch of their own, so that a frame of theirs that comes too late is never taken for another.
        After a dispute all their results come to the client, which then knows for certain whether one lies.
        """
        state, policy = self.state, self.terms.policy
        before = state.before(first)
        state.begin_epoch()
        told = [None, *state.until(first)][-2:] if policy.recovery.upstream_logs else []
        hops = await self._open_hops(route, connections, told, quiet=True, pushing=not failures.is_disputed)
        try:
            if is_outdone is not None and is_outdone():
                raise Busier("is busier than was thought", peer=route[0].peer, span=route[0].span)
            await self._hold_replay(before, hops)
            results: list[ChunkResult] = []

            async def commit(result: ChunkResult) -> None:
                state.log_inputs(result, hops, before)
                results.append(result)

            await self._replay(first, hops, commit, failures)
            for result in results:  # of a replay that was given up, nothing is kept
                await self._take_receipts(result, hops, replay=True)
            self.check_open()  # nobody would close these
        except BaseException:
            await self.abandon(hops)
            raise
        return hops

    async def _replay(
        self, first: SessionHop, hops: Sequence[SessionHop], commit: Commit, failures: StepFailures
    ) -> None:
        """Have new `hops` compute the inputs of `first`, in a time that follows their number. Raises PeerError."""
        policy, began_s = self.terms.policy, trio.current_time()
        most_s = policy.step_timeout_s + self.state.position / policy.recovery.replay_positions_per_s
        is_done = False
        try:
            await run_chunks(hops, self.state.replays(first), policy, commit, began_s + most_s)
            is_done = True
        finally:
            failures.add_try(trio.current_time() - began_s, failed=not is_done)

    async def hold_from_relays(self, chain: Sequence[SessionHop | None], positions: int) -> None:
        """Wait before that number of positions goes along `chain`, where None is the client, see `relay_gate.py`.

        Raises ConfigError.
        """
        size_bytes = payload_bytes(self.terms.codec, positions * self.terms.model.hidden_size)
        await self._gate.pass_when_allowed(chain, positions, size_bytes)

    async def commit(self, result: ChunkResult) -> None:
        """All hops have computed the chunk: the session stands after it now. Raises as `_take_receipts` does."""
        await self._take_receipts(result, self.hops, replay=False)
        self.state.commit(result)
        if self.tools.finder is not None:
            self.tools.finder.note_served(result)

    async def let_go(self) -> None:
        """Free the KV of all hops, which are lost then. Nothing may be under way at them.

        A spot check goes on, and what servers were asked to keep for another process stays.
        """
        checks = self.tools.spot_checks
        if (checks is not None and checks.is_busy) or any(hop.is_leased for hop in self.hops):
            return
        held = [hop for hop in self.hops if hop.failure is None]
        for hop in held:
            hop.failure = LetGo(hop.hop)
        await self.abandon(held)

    async def abandon(self, hops: Sequence[SessionHop]) -> None:
        with trio.CancelScope(shield=True):
            await self.say_goodbye(hops)

    async def say_goodbye(self, hops: Sequence[SessionHop], *, keep: bool = False) -> None:
        """Tell all `hops` at once to free their KV, or to `keep` it: one that takes nothing holds up no other.

        It is waited for as long as for an answer to OPEN.
        """
        with trio.move_on_after(self.terms.policy.open_timeout_s):
            async with trio.open_nursery() as nursery:
                for hop in hops:
                    nursery.start_soon(partial(hop.close, keep=keep))

    async def _hold_replay(self, before: SessionHop | None, hops: Sequence[SessionHop]) -> None:
        """Before all positions go through new `hops`, which stand at their first. Raises PeerError."""
        origin = before if self.terms.policy.recovery.upstream_logs else None
        try:
            await self.hold_from_relays([origin, *hops], self.state.position)
        except ConfigError as error:  # it is about these connections: other peers may be nearer
            log.warning("%s", error)
            relayed = next((hop for hop in hops if hop.connection.only_relayed), hops[0])
            raise PeerUnreachable(str(error), peer=relayed.hop.peer, span=relayed.hop.span) from error
        await self._move(hops, Step(0), 0)

    async def _move(self, hops: Sequence[SessionHop], step: Step, position: int) -> None:
        """Have hops to which there is a direct connection by now go on over it. Raises PeerError."""
        if moving := [hop for hop in hops if hop.has_better_connection]:
            with single_error():
                async with trio.open_nursery() as nursery:
                    for hop in moving:
                        nursery.start_soon(hop.take_better_connection, self.state.epoch, step, position)

    async def _open_hops(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        before: Sequence[SessionHop | None],
        *,
        quiet: bool = False,
        pushing: bool = True,
    ) -> list[SessionHop]:
        """Open new hops, and tell them and the last of `before` their neighbours, as `SessionState.open` says.

        A hop is told the session id at the next one while that is opened, and may open a session of this id there
        first. Then the hops are opened under other ids, and told their neighbours afterwards.

        Raises the PeerError of a hop that does not open, or the failure of the one before; then none is left open.
        """
        open_all = partial(self._open_all, route, connections, before, quiet=quiet, pushing=pushing)
        try:
            return await open_all()
        except PeerRefused as refusal:
            if refusal.code != RefusalCode.CONFLICT or any(each and each.failure for each in before):
                raise
            log.warning("opening sessions of other ids: %s", refusal)
            self.state.begin_epoch()  # the hop before may answer late
            return await open_all(introduce_later=True)

    async def _open_all(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        before: Sequence[SessionHop | None],
        *,
        quiet: bool,
        pushing: bool,
        introduce_later: bool = False,
    ) -> list[SessionHop]:
        """With `introduce_later` neighbours are told when all new hops are open. Raises as `_open_hops`."""
        hops = [SessionHop(hop, connections[hop.peer], self.terms) for hop in route]
        finder = self.tools.finder
        promised: Sequence[PromisedTime | None] = [None] * len(hops) if finder is None else finder.promised_times(route)
        for hop, time in zip(hops, promised, strict=True):
            hop.promised = time
            if finder is not None:
                hop.has_replacement = partial(finder.has_replacement, hop.hop, self.terms.max_length)
            hop.check_prompts()
            hop.pushing.is_trusted = pushing
        try:
            with single_error():
                async with trio.open_nursery() as beside:
                    beside.start_soon(self._note_slow_opening)
                    now_s = trio.current_time()
                    await self._carry_out(self.state.open(hops, [] if introduce_later else before, now_s, quiet=quiet))
                    beside.cancel_scope.cancel()
            if introduce_later:
                await self._carry_out(self.state.introduce(hops, before, trio.current_time(), quiet=quiet))
        except BaseException:
            await self.abandon(hops)
            raise
        return hops

    async def _note_slow_opening(self) -> None:
        """Servers that have KV answer at once, unless much comes first. Others may wait for some, or never answer."""
        finder, brings_more = self.tools.finder, self.terms.adapter is not None or bool(self.terms.prompts)
        if finder is not None and not brings_more:
            await trio.sleep(self.terms.policy.trials.opens_within_s)
            await finder.note_slow(Span(0, self.terms.model.blocks))

    async def _carry_out(self, requests: Iterable[tuple[SessionHop, Sequence[Request]]]) -> None:
        """Send requests to several hops, and wait for all answers. Raises the PeerError of the first that fails."""
        introduce = self.tools.finder.introduce if self.tools.finder is not None else None
        with single_error():
            async with trio.open_nursery() as nursery:
                for hop, each in requests:
                    nursery.start_soon(partial(hop.carry_out, *each, introduce=introduce))

    async def _take_receipts(self, result: ChunkResult, hops: Sequence[SessionHop], *, replay: bool) -> None:
        """Raises IntegrityError, the `failure` of its hop, if it must be sure of their signatures and one is bad."""
        if (book := self.tools.book) is None:
            return
        strict = self.terms.policy.trust.strict
        outputs = zip(hops, result.outputs, strict=True)
        receipts = [signed_receipt(book, hop, result.chunk, output.said) for hop, output in outputs]
        if strict:
            for hop, receipt in zip(hops, receipts, strict=True):
                with hop.blamed():
                    await book.check([receipt])
        given, got = result.inputs[0].digest, result.output.digest
        book.add(receipts, given, got, replay=replay, verified=strict)


def signed_receipt(book: ReceiptBook, hop: HopState, chunk: Chunk, said: Result) -> Receipt:
    """The receipt that `hop` has signed, if it has. Raises IntegrityError if its signature has no valid form."""
    return book.receipt(hop.hop, hop.session, chunk, said.input_digest, said.output_digest, said.signature, hop.nonce)
