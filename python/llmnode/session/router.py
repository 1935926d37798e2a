"""Opens and resumes sessions of one model, over the peers that its finder names at the time."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.errors import ConfigError, NoRoute, PeerError, PeerRefused, single_error
from llmnode.receipts.book import ReceiptBook
from llmnode.session.failures import wants_kv
from llmnode.session.handover import reach_hops
from llmnode.session.overflow import not_sent
from llmnode.session.rows import Rows
from llmnode.session.session import open_session, resume_session
from llmnode.session.spot_checks import SpotChecks
from llmnode.session.tools import SessionTools
from llmnode.wire.deep_prompts import are_sound, most_prompts
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Route
    from llmnode.core.traffic import Traffic
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.saved import SavedSession
    from llmnode.session.session import InferenceSession
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter

log = logging.getLogger(__name__)


class Router:
    """Sessions of one client. `route` is the latest that was taken."""

    def __init__(self, finder: PeerFinder) -> None:
        self.finder = finder
        self.route: Route = ()

    @property
    def swarm(self) -> Swarm:
        return self.finder.swarm

    @property
    def traffic(self) -> Traffic:
        return self.finder.pool.network.traffic

    def sign(self, message: bytes) -> bytes:
        """See `ports.Network.sign`. The key is our own."""
        return self.finder.pool.network.sign(message)

    @asynccontextmanager
    async def open_session(
        self,
        max_length: int,
        codec: Codec,
        beside: InferenceSession | None = None,
        policy: ClientPolicy | None = None,
        adapter: Adapter | None = None,
        prompts: DeepPrompts = NO_PROMPTS,
        rows: Rows | None = None,
    ) -> AsyncIterator[InferenceSession]:
        """A session over the best route of peers that take it, or over that of `beside` if its peers do.

        It waits for KV together with `rows`, by default with those of `beside`. `policy` is for it alone, instead of
        the router's. Its peers get the `adapter`, and the deep `prompts` of all blocks, and compute with them. Raises
        NoRoute or the PeerError that leaves none, and ConfigError for prompts that no server takes.
        """
        if not are_sound(prompts.values, self.finder.model.hidden_size):
            raise not_sent("deep prompts")
        if (most := most_prompts(self.finder.model.row_bytes)) < prompts.positions:
            raise ConfigError(f"{prompts.positions} prompts before a block: servers take {most} of this model")
        if adapter is not None and self.finder.model.adapter is not None:
            raise ConfigError("blocks compute one adapter: this client names another one that servers hold")
        model = self.finder.model if adapter is None else replace(self.finder.model, adapter=adapter.digest)
        terms = SessionTerms(model, max_length, codec, policy or self.finder.policy, adapter, prompts)
        async with AsyncExitStack() as stack:
            yield await self._open(stack, terms, beside, rows or (Rows() if beside is None else beside.rows))

    @asynccontextmanager
    async def resume_session(self, saved: SavedSession) -> AsyncIterator[InferenceSession]:
        """The session that was `saved`, perhaps by another process. Raises NoRoute or SessionLost."""
        if not self.swarm.view.of_model(self.finder.model.digest):
            await self.finder.look_up()
        connections = await reach_hops(self.finder, saved)
        terms = SessionTerms(self.finder.model, saved.max_length, saved.codec, self.finder.policy)
        tools = self._tools(terms, saved.position)
        async with resume_session(saved, connections, terms, tools) as session:
            self._take(session.route)
            yield session

    async def find_any(self) -> Route:
        """A route whose peers answer; asks the directory if the view has none. Raises as `open_session` does.

        A peer that lives and names no address is waited for: it may just have lost its relays.
        """
        policy = self.finder.policy.route
        until_s = trio.current_time() + policy.open_patience_s
        while True:
            try:
                try:
                    self.route, _ = await self.finder.connected_route({}, 0)
                except NoRoute:
                    await self.finder.look_up()
                    self.route, _ = await self.finder.connected_route({}, 0)
                return self.route
            except PeerError:
                if trio.current_time() >= until_s or self.finder.all_have_addresses():
                    raise
            with trio.move_on_after(policy.retry_s):
                await self.finder.wait_changed()
            await self.swarm.ask_around()

    async def try_out(self) -> None:
        """Have one position of zeros computed. Raises PeerError, NoRoute or SessionLost."""
        with single_error():
            async with self.open_session(1, Codec.RAW) as session:
                await session.step(bytes(self.finder.model.row_bytes))

    async def _open(
        self, stack: AsyncExitStack, terms: SessionTerms, beside: InferenceSession | None, rows: Rows
    ) -> InferenceSession:
        began_s = trio.current_time()
        known = self.swarm.view.of_model(self.finder.model.digest)
        too_small = rows.too_small(known, terms.max_length)
        failed = dict(too_small)
        if beside is not None and not any(hop.peer in failed for hop in beside.route):
            try:
                return await self._enter(stack, beside.route, beside.connections, terms, rows)
            except PeerError as error:
                self._blame(error, beside.route, failed)
        while True:
            try:
                route, connections = await self.finder.connected_route(failed, terms.max_length)
            except PeerError as error:
                pause_s = self._pause_s(error, failed, trio.current_time() - began_s, terms.policy)
                if pause_s is None:
                    self.finder.advise()
                    raise
                log.info("asking again in %.1f s: %s", pause_s, error)
                if any(map(wants_kv, failed.values())):
                    await rows.let_go()
                failed = dict(too_small)  # those that the view still counts on may be back, or have free KV
                await trio.sleep(pause_s)
                continue
            too_small = rows.too_small(known, terms.max_length)  # other rows may be opening since
            if any(hop.peer in too_small for hop in route):
                failed |= too_small
                continue
            try:
                session = await self._enter(stack, route, connections, terms, rows)
            except PeerError as error:
                self._blame(error, route, failed)
            else:
                self._take(route)
                return session

    async def _enter(
        self,
        stack: AsyncExitStack,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        terms: SessionTerms,
        rows: Rows,
    ) -> InferenceSession:
        with rows.opening(route, terms.max_length), self.finder.records.own.opening(route):
            return await stack.enter_async_context(open_session(route, connections, terms, self._tools(terms), rows))

    def _take(self, route: Route) -> None:
        self.route = route
        self.finder.warm_standbys(route)

    def _blame(self, error: PeerError, route: Route, failed: dict[PeerId, PeerError]) -> None:
        self.finder.report(error)
        failed[error.peer or route[0].peer] = error

    def _tools(self, terms: SessionTerms, position: int = 0) -> SessionTools:
        """New ones, for a session that begins at `position`."""
        finder = self.finder
        network = finder.pool.network
        book = ReceiptBook(
            network.peer, terms.model, terms.codec, terms.policy.trust, network.verify, finder.run, position
        )
        if not terms.policy.spot_checks.share:
            return SessionTools(finder, book)
        checks = SpotChecks(terms, finder, book, finder.rng, finder.pool.start_soon, finder.run)
        return SessionTools(finder, book, checks)

    def _pause_s(
        self, error: PeerError, failed: Mapping[PeerId, PeerError], waited_s: float, policy: ClientPolicy
    ) -> float | None:
        """How long to wait before those that have `failed` are asked again; None if that is of no use."""
        refusals = [each.retry_after_s for each in failed.values() if isinstance(each, PeerRefused)]
        if retries_s := [each for each in refusals if each]:
            left_s = policy.route.kv_patience_s - waited_s
            all_named_it = len(retries_s) == len(failed)  # else one that lies would keep us from those that do not
            retry_s = min(retries_s) if all_named_it else min(*retries_s, policy.route.longest_pause_s)
            pause_s = retry_s * self.finder.rng.uniform(1, 1.5)  # clients that were refused together come apart
            return min(pause_s, left_s) if left_s > policy.route.retry_s else None
        all_refuse = isinstance(error, PeerRefused) and all(isinstance(each, PeerRefused) for each in failed.values())
        is_hopeless = all_refuse or waited_s > policy.route.open_patience_s
        return None if is_hopeless else policy.route.retry_s
