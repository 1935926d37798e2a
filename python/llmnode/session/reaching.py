"""Connections to the servers of a client's routes: which can be reached, and how far away they are.

A stranger can announce peers that do not exist, so failures are counted (`core/peers/unreached.py`). A link that is
opened to measure a round trip ends again: it would take one of the places that its server has for clients.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import trio

from llmnode.core.peers.unreached import Unreached
from llmnode.core.peers.whereabouts import groups_of, in_turns
from llmnode.core.policy import ProbePolicy
from llmnode.errors import ConfigError, PeerError, PeerTimeout, PeerUnreachable
from llmnode.swarm.probing import measure_round_trip, measure_upload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import RoutePolicy
    from llmnode.core.route import Hop
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool


class RoundTrip(NamedTuple):
    """A measurement."""

    round_trip_s: float
    measured_s: float


class Reaching:
    """For one client."""

    def __init__(self, pool: ConnectionPool, policy: RoutePolicy, met_in: Callable[[], Mapping[PeerId, str]]) -> None:
        """`met_in` says where peers were met, see `core/peers/whereabouts.py`."""
        self._pool = pool
        self._met_in = met_in
        self._policy = policy
        self._unreached = Unreached(policy)
        self._measuring: set[PeerId] = set()
        self._measured: dict[PeerId, RoundTrip] = {}  # the latest ones at the end
        self._upload: tuple[float, float] | None = None  # bytes/s, and when that was measured
        self._measures_upload = False

    def round_trips_s(self) -> dict[PeerId, float]:
        """The round trips to the servers that answered when they were last measured."""
        return {peer: each.round_trip_s for peer, each in self._measured.items()}

    @property
    def has_doubts(self) -> bool:
        """Whether any server costs more because others could not be reached."""
        return self._unreached.has_any

    def doubt_s(self, groups: Collection[str]) -> float:
        """The cost of a server in these address groups that was never reached, in seconds a token, since others could
        not be.
        """
        return self._unreached.cost_s(groups, trio.current_time())

    def in_turns(self, servers: Sequence[Announcement]) -> list[Announcement]:
        """The same, so that address groups have turns."""
        return in_turns(servers, self._met_in())

    async def reach(self, announcement: Announcement, *, keeps: bool = True) -> PeerConnection:
        """A connection to one server, which `release` ends if nobody `keeps` it. Raises PeerError."""
        return await self._connect(announcement, self._policy.connect_timeout_s, keeps=keeps)

    async def release(self, connection: PeerConnection) -> None:
        """End a connection that nobody keeps or uses."""
        await self._pool.release(connection)

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` for as long as the connections live."""
        self._pool.start_soon(work)

    async def connect(
        self, route: Sequence[Hop], usable: Sequence[Announcement]
    ) -> tuple[Mapping[PeerId, PeerConnection], Sequence[PeerError]]:
        """Connect to all hops at once, until one cannot be reached, and for a moment more. Returns the failures too.

        A dial that is under way then goes on: its peer may be wanted again.
        """
        announced = {each.peer: each for each in usable}
        connections: dict[PeerId, PeerConnection] = {}
        errors: list[PeerError] = []
        first, last = trio.Event(), trio.Event()  # to be decided

        async def connect(hop: Hop) -> None:
            try:
                connections[hop.peer] = await self.reach(announced[hop.peer])
            except PeerError as error:
                errors.append(error.blame(hop.peer, hop.span))
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

    def warm_some(self, usable: Sequence[Announcement]) -> None:
        """Connect to a few others, of different address groups: a stranger's inventions are not met one by one."""
        living, met = {each.peer for each in self._pool.living()}, self._met_in()
        others = in_turns([each for each in usable if each.peer not in living and each.addresses], met)
        others.sort(key=lambda each: self.doubt_s(groups_of(each, met)))
        for each in others[: self._policy.tries_beside]:
            self._pool.start_soon(partial(self._warm, each))

    def measure_some(self, first: Collection[PeerId], usable: Sequence[Announcement]) -> None:
        """Begin to measure the round trips to the peers `first`, and to a few others. Later routes know them.

        Those that were measured lately are left out.
        """
        since_s = trio.current_time() - self._policy.measure_again_s
        known = {*self._measuring, *(peer for peer, each in self._measured.items() if each.measured_s > since_s)}
        wanted = [each for each in usable if each.peer not in known and each.addresses]
        most = max(0, self._policy.measured_peers - len(known.difference(first)))
        met = self._met_in()
        others = (each for each in wanted if each.peer not in first and not self.doubt_s(groups_of(each, met)))
        for each in [*(each for each in wanted if each.peer in first), *islice(others, most)]:
            self._measuring.add(each.peer)
            self._pool.start_soon(partial(self._measure, each))

    def upload_bytes_per_s(self) -> float:
        """How fast a server has taken bytes from this client; 0 while none has."""
        return 0.0 if self._upload is None else self._upload[0]

    def measure_upload(self, announcement: Announcement, again_s: float) -> None:
        """Begin to measure how fast the server takes bytes, unless that was measured with one for `again_s`."""
        now_s = trio.current_time()
        is_fresh = self._upload is not None and now_s < self._upload[1] + again_s
        if not is_fresh and not self._measures_upload and announcement.addresses:
            self._measures_upload = True
            self._pool.start_soon(partial(self._measure_upload, announcement))

    async def _measure_upload(self, announcement: Announcement) -> None:
        try:
            with suppress(PeerError):
                connection = await self._connect(announcement, self._policy.measure_s, keeps=False)
                try:
                    rate = await measure_upload(connection.best, ProbePolicy())
                    self._upload = rate, trio.current_time()
                finally:
                    await self._pool.release(connection)
        finally:
            self._measures_upload = False

    async def _warm(self, announcement: Announcement) -> None:
        with suppress(PeerError):
            await self.reach(announcement)

    async def _measure(self, announcement: Announcement) -> None:
        peer, found_s = announcement.peer, None
        try:
            with suppress(PeerError):
                connection = await self._connect(announcement, self._policy.measure_s, keeps=False)
                try:
                    with trio.move_on_after(self._policy.measure_s):
                        found_s = await measure_round_trip(connection.best, ProbePolicy())
                finally:
                    await self._pool.release(connection)
        finally:
            self._measuring.discard(peer)
        self._measured.pop(peer, None)
        if found_s is not None:
            self._measured[peer] = RoundTrip(found_s, trio.current_time())
            if len(self._measured) > self._policy.round_trips:
                del self._measured[next(iter(self._measured))]

    async def _connect(self, announcement: Announcement, timeout_s: float, *, keeps: bool = True) -> PeerConnection:
        """Raises PeerError, and counts that the peer could not be reached."""
        try:
            with trio.fail_after(timeout_s):
                return await self._pool.connect(announcement.addresses, keeps=keeps)
        except (PeerError, ConfigError, trio.TooSlowError) as error:
            self._measured.pop(announcement.peer, None)
            self._unreached.note(groups_of(announcement, self._met_in()), trio.current_time())
            if isinstance(error, PeerError):
                raise
            if isinstance(error, ConfigError):  # the peer announced it, not the user
                raise PeerUnreachable(f"announces no usable address: {error}") from error
            raise PeerTimeout(f"no connection in {timeout_s:g} s").after(timeout_s) from error
