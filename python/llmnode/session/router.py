"""Which peers a session goes through, at first and when it has lost one: routes over the view, and connections."""

from __future__ import annotations

import logging
import random
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.absence import explain_absence
from llmnode.core.peers.bans import Bans
from llmnode.core.peers.suspicion import Suspicion
from llmnode.core.route import Hop, HopCost, Route, find_detour, find_route
from llmnode.core.view import online
from llmnode.errors import ConfigError, IntegrityError, NoRoute, PeerError, PeerRefused, PeerTimeout, PeerUnreachable
from llmnode.receipts.book import ReceiptBook
from llmnode.session.saved import MOST_CONTACTS, pack, write
from llmnode.session.session import open_session, resume_session
from llmnode.session.spot_checks import SpotChecks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.span import Span
    from llmnode.core.traffic import Traffic
    from llmnode.receipts.book import Run
    from llmnode.session.saved import SavedSession
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.wire.payload import Codec

log = logging.getLogger(__name__)


class Router:
    """Opens sessions of one model over what the view knows at the time."""

    def __init__(
        self,
        model: ModelInfo,
        pool: ConnectionPool,
        swarm: Swarm,
        policy: ClientPolicy,
        rng: random.Random | None = None,
        run: Run = trio.to_thread.run_sync,
    ) -> None:
        """`run` runs what takes long, off the event loop."""
        self.swarm = swarm
        self.route: Route = ()
        self._model = model
        self._pool = pool
        self._policy = policy
        self._bans = Bans(policy.ban_s, policy.longest_ban_s)
        self._suspicion = Suspicion(policy)
        self._full_until_s: dict[PeerId, float] = {}  # who had no room for a session, by its own estimate
        self._run = run
        self._rng = rng or random.Random()

    @property
    def traffic(self) -> Traffic:
        return self._pool.network.traffic

    @asynccontextmanager
    async def open_session(
        self,
        max_length: int,
        codec: Codec,
        beside: InferenceSession | None = None,
        policy: ClientPolicy | None = None,
    ) -> AsyncIterator[InferenceSession]:
        """A session over the best route of peers that take it, or that of `beside`, if its peers do.

        `policy` is for it alone, instead of the router's.
        Raises NoRoute or the PeerError that leaves none.
        """
        async with AsyncExitStack() as stack:
            yield await self._open_session(stack, max_length, codec, beside, policy or self._policy)

    @asynccontextmanager
    async def resume_session(self, saved: SavedSession) -> AsyncIterator[InferenceSession]:
        """The session that was `saved`, perhaps by another process. Raises NoRoute or SessionLost."""
        if not self.swarm.view.of_model(self._model.digest):
            await self.swarm.look_up(self._model.digest)
        connections = await self._reach(saved)
        network = self._pool.network
        book = ReceiptBook(
            network.peer, self._model, saved.codec, self._policy, network.verify, self._run, saved.position
        )
        spot = self._spot_checks(saved.codec, book)
        async with resume_session(saved, connections, self._model, self._policy, self, book, spot) as session:
            self.route = session.route
            self._warm_standbys(session.route)
            yield session

    async def find_any(self) -> Route:
        """A route whose peers answer; asks the directory if the view has none. Raises as `open_session` does.

        A peer that lives and names no address is waited for: it may just have lost its relays.
        """
        until_s = trio.current_time() + self._policy.open_patience_s
        while True:
            try:
                try:
                    self.route, _ = await self._connected_route({}, 0)
                except NoRoute:
                    await self.swarm.look_up(self._model.digest)
                    self.route, _ = await self._connected_route({}, 0)
                return self.route
            except PeerError:
                if trio.current_time() >= until_s or all(each.addresses for each in self._candidates()):
                    raise
            with trio.move_on_after(self._policy.retry_s):
                await self.wait_changed()
            await self.swarm.ask_around()

    async def _open_session(
        self,
        stack: AsyncExitStack,
        max_length: int,
        codec: Codec,
        beside: InferenceSession | None,
        policy: ClientPolicy,
    ) -> InferenceSession:
        def opening(
            route: Route, connections: Mapping[PeerId, PeerConnection]
        ) -> AbstractAsyncContextManager[InferenceSession]:
            network = self._pool.network
            book = ReceiptBook(network.peer, self._model, codec, policy, network.verify, self._run)
            spot = self._spot_checks(codec, book)
            return open_session(route, connections, self._model, max_length, codec, policy, self, book, spot)

        failed: dict[PeerId, PeerError] = {}
        began_s = trio.current_time()
        if beside is not None:
            try:
                return await stack.enter_async_context(opening(beside.route, beside.connections))
            except PeerError as error:
                self.report(error)
                failed[error.peer or beside.route[0].peer] = error
        while True:
            try:
                route, connections = await self._connected_route(failed, max_length)
            except PeerError as error:
                pause_s = self._pause_s(error, failed, trio.current_time() - began_s, policy)
                if pause_s is None:
                    raise
                log.info("asking again in %.1f s: %s", pause_s, error)
                failed.clear()  # those that the view still counts on may be back, or have room
                await trio.sleep(pause_s)
                continue
            try:
                session = await stack.enter_async_context(opening(route, connections))
            except PeerError as error:
                self.report(error)
                failed[error.peer or route[0].peer] = error
            else:
                self.route = route
                self._warm_standbys(route)
                return session

    def sign(self, message: bytes) -> bytes:
        """As `ports.Network.sign`, by our own key."""
        return self._pool.network.sign(message)

    def _spot_checks(self, codec: Codec, book: ReceiptBook) -> SpotChecks | None:
        if not self._policy.spot_check:
            return None
        start_soon = self._pool.start_soon
        return SpotChecks(self._model, codec, self._policy, self, book, self._rng, start_soon, self._run)

    def _pause_s(
        self, error: PeerError, failed: Mapping[PeerId, PeerError], waited_s: float, policy: ClientPolicy
    ) -> float | None:
        """How long to wait before those that have `failed` are asked again; None if that is of no use."""
        refusals = [each.retry_after_s for each in failed.values() if isinstance(each, PeerRefused)]
        if retries_s := [each for each in refusals if each]:
            left_s = policy.room_patience_s - waited_s
            pause_s = min(retries_s) * self._rng.uniform(1, 1.5)  # those that were refused together come apart
            return min(pause_s, left_s) if left_s > policy.retry_s else None
        is_hopeless = isinstance(error, PeerRefused) or waited_s > policy.open_patience_s
        return None if is_hopeless else policy.retry_s

    # What a session asks that has lost a peer

    def report(self, error: PeerError) -> None:
        """See `PeerFinder`."""
        if error.peer is None:
            return
        if isinstance(error, PeerRefused):
            if error.retry_after_s is not None:
                now_s = trio.current_time()
                still = {each: until_s for each, until_s in self._full_until_s.items() if until_s > now_s}
                self._full_until_s = {**still, error.peer: now_s + error.retry_after_s}
            return
        if isinstance(error, IntegrityError) and error.proof is not None:
            self._suspicion.convict(error.peer, trio.current_time())
        self._bans.report(error.peer, trio.current_time())

    def suspect(self, peers: Collection[PeerId]) -> None:
        """See `PeerFinder`."""
        self._suspicion.suspect(peers, trio.current_time())

    async def find(
        self, span: Span, positions: int, avoid: Collection[PeerId], *, hurry: bool
    ) -> tuple[Route, Mapping[PeerId, PeerConnection]]:
        """See `PeerFinder`."""
        usable = [
            each
            for each in self._candidates(positions)
            if each.peer not in avoid and (hurry or not self._is_banned(each))
        ]
        try:
            route = find_detour(span, _held(usable), self._costs(usable, positions))
        except NoRoute as error:
            raise NoRoute(error.missing, self._hint(error.missing, positions, avoid)) from None
        connections, errors = await self._connect(route, usable)
        if errors:
            raise errors[0]
        self._warm_standbys(route)
        return route, connections

    async def introduce(self, connection: PeerConnection, peer: PeerId) -> None:
        """See `PeerFinder`."""
        await self.swarm.introduce(connection, [peer])

    async def wait_changed(self) -> None:
        """See `PeerFinder`."""
        await self.swarm.wait_changed()

    def distrust(self, peer: PeerId) -> None:
        """See `PeerFinder`."""
        self._suspicion.distrust(peer, trio.current_time())

    async def find_twin(self, span: Span, avoid: Collection[PeerId]) -> tuple[Hop, PeerConnection]:
        """See `PeerFinder`."""
        twins = [
            each
            for each in self._candidates()
            if each.offer.span.covers(span) and each.peer not in avoid and not self._is_banned(each)
        ]
        if not twins:
            raise NoRoute([span])
        hop = Hop(twins[0].peer, span)
        connections, errors = await self._connect([hop], twins)
        if errors:
            raise errors[0]
        return hop, connections[hop.peer]

    async def save(self, saved: SavedSession, path: Path) -> None:
        """See `PeerFinder`."""
        known = {each.peer: each.addresses for each in self.swarm.view.announcements()}
        hops = [address for hop in saved.hops for address in known.pop(hop.peer, ())]
        others = [address for addresses in known.values() for address in addresses]
        contacts = dict.fromkeys([*hops, *self.swarm.contacts, *others])
        key = self._pool.network.key
        complete = replace(saved, contacts=tuple(contacts)[:MOST_CONTACTS], key=key)
        await self._run(lambda: write(path, pack(complete)))

    # Inside

    async def _reach(self, saved: SavedSession) -> Mapping[PeerId, PeerConnection]:
        """Connections to those hops that can be reached, at the addresses that they announce, or had."""
        known = {each.peer: each.addresses for each in self.swarm.view.of_model(self._model.digest)}
        connections: dict[PeerId, PeerConnection] = {}

        async def reach(peer: PeerId) -> None:
            had = [address for address in saved.contacts if address.rpartition("/p2p/")[2] == peer]
            try:
                with trio.fail_after(self._policy.connect_timeout_s):
                    connections[peer] = await self._pool.connect(known.get(peer) or had)
            except (PeerError, ConfigError, trio.TooSlowError) as error:
                log.info("cannot reach peer=%s, which had the session: %s", peer, error)
                self.report(PeerUnreachable("cannot be reached", peer=peer))

        async with trio.open_nursery() as nursery:
            for peer in dict.fromkeys(each.peer for each in saved.hops if each.session is not None):
                nursery.start_soon(reach, peer)
        return connections

    async def _connected_route(
        self, failed: dict[PeerId, PeerError], positions: int
    ) -> tuple[Route, Mapping[PeerId, PeerConnection]]:
        """A route for so many positions over peers that have not `failed`, each with a living connection.

        Who cannot be reached is added to them.
        """
        while True:
            usable = [each for each in self._candidates(positions) if each.peer not in failed]
            route = self._route(usable, failed, positions)
            connections, errors = await self._connect(route, usable)
            if not errors:
                return route, connections
            for error in errors:
                self.report(error)
                failed[error.peer or route[0].peer] = error

    def _route(self, usable: Sequence[Announcement], failed: dict[PeerId, PeerError], positions: int) -> Route:
        """Over peers that are not banned, if that will do."""
        good = [each for each in usable if not self._is_banned(each)]
        try:
            return find_route(self._model.blocks, _held(good), self._costs(good, positions))
        except NoRoute:
            pass
        try:
            return find_route(self._model.blocks, _held(usable), self._costs(usable, positions))
        except NoRoute as error:
            if failed:
                raise next(reversed(failed.values())) from error
            raise NoRoute(error.missing, self._hint(error.missing, positions)) from None

    async def _connect(
        self, route: Sequence[Hop], usable: Sequence[Announcement]
    ) -> tuple[Mapping[PeerId, PeerConnection], Sequence[PeerError]]:
        """To all at once, until one cannot be reached, and for a moment more. Returns who cannot, too.

        Who else is being dialled then still is: it may be wanted again.
        """
        addresses = {each.peer: each.addresses for each in usable}
        connections: dict[PeerId, PeerConnection] = {}
        errors: list[PeerError] = []
        first, last = trio.Event(), trio.Event()  # to be decided

        async def connect(hop: Hop) -> None:
            try:
                with trio.fail_after(self._policy.connect_timeout_s):
                    connections[hop.peer] = await self._pool.connect(addresses[hop.peer])
            except PeerError as error:
                errors.append(error.blame(hop.peer, hop.span))
            except trio.TooSlowError:
                what = f"no connection in {self._policy.connect_timeout_s:g} s"
                errors.append(PeerTimeout(what, peer=hop.peer, span=hop.span))
            except ConfigError as error:  # of what the peer says of itself, and not the user
                what = f"announces no usable address: {error}"
                errors.append(PeerUnreachable(what, peer=hop.peer, span=hop.span))
            if len(connections) + len(errors) == len(route):
                last.set()
            if errors or last.is_set():
                first.set()

        for hop in route:
            self._pool.start_soon(partial(connect, hop))
        await first.wait()
        with trio.move_on_after(self._policy.connect_moment_s):
            await last.wait()
        return connections, errors

    def _warm_standbys(self, route: Route) -> None:
        """Connect to who would take the place of each hop."""
        if not self._policy.standbys:
            return
        peers = {hop.peer for hop in route}
        others = [each for each in self._candidates() if each.peer not in peers and not self._is_banned(each)]
        addresses = {each.peer: each.addresses for each in others}
        for hop in route:
            with suppress(NoRoute):
                for standby in find_detour(hop.span, _held(others), self._costs(others)):
                    self._pool.warm(addresses[standby.peer])

    def _is_banned(self, announcement: Announcement) -> bool:
        return self._bans.is_banned(announcement.peer, trio.current_time())

    def _costs(self, announcements: Sequence[Announcement], positions: int = 0) -> dict[PeerId, HopCost]:
        """By what peers say of themselves, dearer for the suspected and those without room for so many positions.

        How long the way to each takes is not known.
        """
        default, now_s = HopCost(), trio.current_time()
        costs = {}
        for each in announcements:
            penalty = self._suspicion.penalty(each.peer, now_s)
            block_s = each.offer.block_us / 1e6 or default.block_s
            is_full = each.offer.kv_tokens_free < positions or self._full_until_s.get(each.peer, 0.0) > now_s
            wait_s = self._policy.room_cost_s if is_full else 0.0
            costs[each.peer] = HopCost(penalty * default.hop_s + wait_s, penalty * block_s)
        return costs

    def _candidates(self, positions: int = 0) -> list[Announcement]:
        """Those whose KV is large enough for so many, when all of it is free."""
        model = self._model
        holders = online(self.swarm.view.of_model(model.digest))
        now_s = trio.current_time()
        usable = [
            each
            for each in holders
            if each.offer.profile == model.profile
            and each.offer.kv_tokens >= positions
            and not self._suspicion.is_excluded(each.peer, now_s)
        ]
        self._rng.shuffle(usable)  # of equal peers, clients take different ones
        return usable

    def _hint(self, missing: Sequence[Span], positions: int, failed: Collection[PeerId] = ()) -> str:
        """What the swarm has instead, if anything, and what to do."""
        known, now_s = self.swarm.view.announcements(), trio.current_time()
        excluded = [each.peer for each in known if self._suspicion.is_excluded(each.peer, now_s)]
        why = explain_absence(
            self._model,
            missing,
            known,
            positions=positions,
            clocks=self.swarm.judge_clocks(),
            excluded=excluded,
            failed=failed,
        )
        return str(why)


def _held(announcements: Sequence[Announcement]) -> list[Hop]:
    return [Hop(each.peer, each.offer.span) for each in announcements]
