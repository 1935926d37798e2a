"""One peer's knowledge of the swarm: a view that it keeps current by exchanging announcements with other peers.

The directory finds a swarm, and the exchange keeps it current. Every announcement is signed, so any
peer may pass it on; it is verified before it is believed. Servers, relays and clients keep a view. Servers announce.
"""

from __future__ import annotations

import importlib.metadata
import logging
import random
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import DOUBLE, Announcement, PeerState
from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import PeerId
from llmnode.core.own_announcements import OwnAnnouncements
from llmnode.core.peers.clocks import Clocks
from llmnode.core.peers.exchanges import Exchanges
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.view import Source, View, is_news
from llmnode.errors import ConfigError, PeerError, RemoteProtocolError
from llmnode.swarm.entering import enter
from llmnode.swarm.old_forms import OldForms
from llmnode.swarm.peer_connection import source_of
from llmnode.swarm.view_exchange import READ_AT_ONCE, ViewExchange, with_pauses
from llmnode.wire.announcement import is_signed_by_peer, pack_news, sign_announcement, unpack_news
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llmnode.core.announcement import Offer, SignedAnnouncement
    from llmnode.core.peers.clocks import ClockVerdict
    from llmnode.core.policy import SwarmPolicy
    from llmnode.ports import Directory, Link, Network
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.wire.announcement import News

log = logging.getLogger(__name__)

PLACE_BYTES = 8 << 10
"""An announcement of the largest size in a view takes this much memory."""
DIRECTORY = Source(PeerId("the directory"), "the directory")
"""Anybody may write into the directory. So all peers that it names count as named by one source."""


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Swarm:
    """Our view of the other peers, and our own announcement. `run` keeps both current.

    `contacts` are the addresses that the user gave, but for our own: the first peers to ask. A node that `roams` opens
    links to others for the exchange alone. A client does not, and asks the peers that it is connected to anyway.
    """

    def __init__(
        self,
        network: Network,
        pool: ConnectionPool,
        policy: SwarmPolicy,
        *,
        contacts: Sequence[str] = (),
        directory: Directory | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        rng: random.Random | None = None,
        roams: bool = True,
    ) -> None:
        self._rng = rng or random.Random()
        self.view = View(policy, {network.peer, *(peer_of(each) for each in contacts)}, self._rng)
        self._view_exchange = ViewExchange(self.view, policy, now_ms, OldForms(network.verify, policy.view_peers))
        self._clocks = Clocks(policy)
        self._exchanges = Exchanges(policy, self._rng)
        self._network = network
        self._pool = pool
        self._policy = policy
        view = network.budget.process.open(Kind.PEER, "the view")
        if not view.take(Resource.MEMORY, policy.view_peers * PLACE_BYTES):
            raise ConfigError("the memory budget leaves nothing for a view: raise BudgetPolicy.memory_bytes")
        self.contacts = [each for each in contacts if peer_of(each) != network.peer]
        network.vouch(contacts)
        self._directory = directory
        self._now_ms = now_ms
        self._roams = roams
        self._news = trio.Event()
        self._changed = trio.Event()
        self._noticed = trio.Event()
        self._own = OwnAnnouncements(policy, now_ms())
        self.unread = 0
        """Announcements that were skipped because this version cannot read them."""
        self._offer: Callable[[], Offer] | None = None

    @property
    def peer(self) -> PeerId:
        """Our own."""
        return self._network.peer

    @property
    def double(self) -> Announcement | None:
        """The announcement of another node that uses our identity; None if there is none, or it is long ago."""
        return self._own.double(trio.current_time())

    @property
    def clock_offsets_ms(self) -> dict[PeerId, int]:
        """By how much the clock of each peer is ahead of ours. Only peers that have told it lately are there."""
        return self._clocks.offsets_ms(trio.current_time())

    def judge_clocks(self) -> ClockVerdict:
        return self._clocks.judge(trio.current_time())

    async def wait_noticed(self) -> None:
        """Wait until `double` or the clock of a peer is new."""
        await self._noticed.wait()

    # Keeping current

    async def run(self) -> None:
        """Exchange with others until cancelled: with one of them from time to time, with several when there is news."""
        while True:
            with trio.move_on_after(self._policy.exchange_every_s * self._rng.uniform(0.8, 1.2)):
                await self._news.wait()
            fanout = self._policy.fanout if self._news.is_set() else 1
            self._news = trio.Event()
            await self._exchange_with_some(fanout)
            await trio.sleep(self._exchanges.pause_s(len(self.view)))

    async def announce(self, offer: Callable[[], Offer]) -> None:
        """Announce what `offer` returns, and again before it expires, until cancelled."""
        self._offer = offer
        async with trio.open_nursery() as nursery:
            if self._directory is not None:
                nursery.start_soon(self._publish, self._directory)
            while True:
                self.say(offer())
                await trio.sleep(self._policy.announce_every_s)

    async def leave(self, offer: Offer) -> None:
        """Tell our neighbours that we stop serving `offer`. They tell the others."""
        self.say(replace(offer, state=PeerState.LEFT))
        with trio.move_on_after(self._policy.farewell_s):
            await self._exchange_with_some(self._policy.neighbours)

    def say(self, offer: Offer) -> None:
        """Sign an announcement of `offer` and let others hear of it soon."""
        sequence = self._own.next_sequence(self._now_ms())
        if (held := self.view.of_peer(self.peer)) is not None and held.sequence > sequence:
            self.view.forget(self.peer)  # our clock was set back
        announcement = Announcement(
            peer=self._network.peer,
            addresses=tuple(self._network.addresses)[: self._policy.addresses],
            sequence=sequence,
            expires_ms=sequence + int(1000 * self._policy.lifetime_s),
            software=software() if self.double is None else f"{software()} ({DOUBLE})",
            offer=offer,
        )
        self._take(sign_announcement(announcement, self._network.sign), Source(self.peer, self.peer))

    def met_in(self) -> dict[PeerId, str]:
        """The address groups of the peers that we are connected to, and of those that we have met before."""
        return self.view.met_in | self.connected_in()

    def connected_in(self) -> dict[PeerId, str]:
        """The address groups of the peers that we are connected to."""
        return {each.peer: each.source.group for each in self._pool.living()}

    def state_age_s(self, peer: PeerId) -> float:
        """The seconds since we heard that this peer of the view is in its present state."""
        return self.view.state_age_s(peer, self._now_ms())

    def age_s(self, announcement: Announcement) -> float:
        """The seconds since it was made, as far as the clocks agree."""
        return max(0.0, (self._now_ms() - announcement.sequence) / 1000)

    async def wait_changed(self) -> None:
        """Wait until a new offer is in the view, or a known one has expired."""
        await self._changed.wait()

    async def ask_around(self) -> None:
        """Exchange views with neighbours now, not at the next interval."""
        await self._exchange_with_some(self._policy.neighbours)

    async def look_up(self, model_digest: bytes) -> None:
        """Ask the directory for servers of a model, and ask those servers for what they know."""
        if self._directory is None:
            return
        await self._merge(await self._directory.find(model_digest), DIRECTORY)
        async with trio.open_nursery() as nursery:  # those that hang cost the time of one
            for announcement in self.view.of_model(model_digest)[: self._policy.neighbours]:
                nursery.start_soon(self._try_exchange, announcement.addresses)

    async def connect(self, addresses: Sequence[str]) -> PeerConnection:
        """Our open connection to the peer at `addresses`, or a new one. Raises as `ConnectionPool.connect`."""
        return await self._pool.connect(addresses)

    async def meet(self, *addresses: str) -> None:
        """Exchange views with the peer at `addresses`. Raises PeerError."""
        await self.exchange(await self._pool.connect(addresses))

    async def meet_all(self, addresses: Sequence[str], former: Sequence[Sequence[str]] = ()) -> None:
        """Exchange views with the peers at `addresses`, all at once. Raises the PeerError of the first if none answers.

        Then the peers of a `former` run are asked, too: see `enter`. Our own address may be among them, where all nodes
        are given one list. Then no other peer has to answer.
        """

        async def meet(peer_addresses: Sequence[str]) -> None:
            await self.meet(*peer_addresses)

        named = self._of_others(addresses)
        known = {peer_of(each[0]) for each in named}
        others = self._of_others(each for of_peer in former for each in of_peer)
        unnamed = [each for each in others if peer_of(each[0]) not in known]
        if not await enter(meet, self._pool.start_soon, named, unnamed):
            log.warning("none of the named peers answers: the swarm was found through peers of a former run")

    def _of_others(self, addresses: Iterable[str]) -> list[list[str]]:
        """The addresses of each peer but ourselves: one that cannot be reached at the first may be at another."""
        by_peer: dict[str, list[str]] = {}
        for address in dict.fromkeys(addresses):
            by_peer.setdefault(peer_of(address), []).append(address)
        by_peer.pop(self._network.peer, None)
        return list(by_peer.values())

    async def exchange(self, connection: PeerConnection) -> None:
        """Exchange views with a peer. Afterwards both know what either knew. Raises PeerError."""

        async def believe(news: News) -> None:
            await self._merge(news.read(), connection.source)

        told = await self._view_exchange.ask(connection, believe)
        self.view.meet(connection.source)
        self._note_clock(connection.source, told.ahead_ms, asked=True)
        await self.introduce(connection, told.wanted)

    async def introduce(self, connection: PeerConnection, peers: Iterable[PeerId]) -> None:
        """Send a peer the announcements of `peers` that we have. Raises PeerUnreachable."""
        wanted = set(peers)
        if theirs := [signed for signed in self.view.newer_than({}) if signed.announcement.peer in wanted]:
            forms = await self._view_exchange.forms_for(connection.version, theirs)
            meta, payload = pack(Clock(self._now_ms())), pack_news(forms, [], self._policy)
            await connection.tell(Frame(FrameType.NEWS, meta=meta, payload=payload))

    # Being asked

    @property
    def most_answer_bytes(self) -> int:
        """An answer about our view has at most this size."""
        return self._view_exchange.most_answer_bytes

    async def answer(self, frame: Frame, link: Link) -> Frame:
        """The answer to a question of a peer about our view. Raises RemoteProtocolError."""
        clock = unpack(Clock, frame.meta)
        self._note_clock(source_of(link), clock.now_ms - self._now_ms(), asked=False)
        self._drop_expired()
        return await self._view_exchange.answer(frame, link.version)

    async def take_news(self, frame: Frame, link: Link) -> None:
        """Believe an unasked NEWS frame, as far as it is signed and names few newcomers. Raises RemoteProtocolError."""
        unpack(Clock, frame.meta)
        news = await with_pauses(unpack_news(frame.payload, self._policy))
        await self._merge(news.read(), source_of(link), unasked_in=link.group)

    # Inside

    async def _merge(
        self,
        announcements: Iterable[SignedAnnouncement | RemoteProtocolError],
        source: Source,
        *,
        unasked_in: str | None = None,
    ) -> None:
        """Raises RemoteProtocolError at the first announcement that its own peer has not signed.

        `unasked_in` is the address group of a link whose peer was not asked. Relays are several there: one peer behind
        a relay does not use up what those behind others may tell.
        """
        self._drop_expired()
        is_asked = unasked_in is None
        teller = source if unasked_in is None else Source(source.peer, unasked_in)
        for number, signed in enumerate(announcements, 1):
            if isinstance(signed, RemoteProtocolError):
                self._note_unread(source.peer, signed)
            elif self.view.may_hear(signed.announcement.peer, teller, self._now_ms(), is_asked=is_asked):
                self._believe(signed, source)
            if number % READ_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()

    def _believe(self, signed: SignedAnnouncement, source: Source) -> None:
        """Keep it, if it is new. Raises RemoteProtocolError if its own peer has not signed it."""
        announcement = signed.announcement
        is_ours = announcement.peer == self._network.peer
        if not (self._is_foreign if is_ours else self.view.is_newer)(announcement, self._now_ms()):
            return
        if not is_signed_by_peer(signed, self._network.verify):
            raise RemoteProtocolError(f"passes on an announcement that {announcement.peer} did not sign")
        if is_ours:
            self._take_foreign(announcement)
        else:
            self._take(signed, source)

    def _note_unread(self, peer: PeerId, error: RemoteProtocolError) -> None:
        if not self.unread:
            log.warning("peer=%s passes on an announcement that this llmnode cannot read: %s", peer, error.message)
        self.unread += 1

    def _is_foreign(self, announcement: Announcement, now_ms: int) -> bool:
        """Whether it is valid, and another node with our key made it since we began."""
        return self._own.is_foreign(announcement) and self.view.holds(announcement, now_ms)

    def _take_foreign(self, announcement: Announcement) -> None:
        known = self.double
        if self._own.take_foreign(announcement, self._now_ms(), trio.current_time()) and self._offer is not None:
            self.say(self._offer())
        if self.double is announcement:
            if known is None or is_news(known, announcement):
                log.info("another node uses our identity, at %s", " ".join(announcement.addresses))
            self._note_noticed()

    def _note_clock(self, source: Source, offset_ms: int, *, asked: bool) -> None:
        if source.peer != self._network.peer:
            self._clocks.note(source.peer, offset_ms, trio.current_time(), source.group, asked=asked)
            self._note_noticed()

    def _note_noticed(self) -> None:
        self._noticed.set()
        self._noticed = trio.Event()

    def _take(self, signed: SignedAnnouncement, source: Source) -> None:
        if self.view.accept(signed, self._now_ms(), source):
            offer = signed.announcement.offer
            log.info("news peer=%s state=%s span=%s", signed.announcement.peer, offer.state, offer.span)
            self._news.set()
            self._note_change()

    def _drop_expired(self) -> None:
        for peer in self.view.drop_expired(self._now_ms()):
            log.info("expired peer=%s", peer)
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _exchange_with_some(self, count: int) -> None:
        """Exchange with `count` connected neighbours, or more of many. If there are few of them, one is new."""
        self._drop_expired()
        living = {each.peer: each for each in self._pool.living()}
        if self._roams:
            for peer in self._exchanges.leaving({peer: each.source.group for peer, each in living.items()}):
                await living.pop(peer).end()
        wanted = self._policy.neighbours if self._roams else 1
        async with trio.open_nursery() as nursery:
            if len(living) < wanted and (addresses := self._stranger(living)):
                nursery.start_soon(self._try_exchange, addresses)
            for peer in self._exchanges.take_next(list(living), count, trio.current_time()):
                nursery.start_soon(self._try_exchange_with, living[peer])

    def _stranger(self, living: Iterable[PeerId]) -> Sequence[str]:
        """The addresses of a random peer without a link to us. The user's contacts are among the candidates."""
        known = {*living, self._network.peer}
        choices = [each.addresses for each in self.view.announcements() if each.peer not in known and each.addresses]
        contacts = [[each] for each in self.contacts if peer_of(each) not in known]
        return self._rng.choice([*choices, *contacts]) if choices or contacts else []

    async def _try_exchange(self, addresses: Sequence[str]) -> None:
        try:
            await self.exchange(await self._pool.connect(addresses))
        except (PeerError, ConfigError) as error:
            log.debug("no exchange: %s", error)

    async def _try_exchange_with(self, connection: PeerConnection) -> None:
        try:
            await self.exchange(connection)
        except PeerError as error:
            self._exchanges.note_failed(connection.peer, trio.current_time())
            log.debug("no exchange: %s", error)

    async def _publish(self, directory: Directory) -> None:
        while True:
            own = [each for each in self.view.newer_than({}) if each.announcement.peer == self._network.peer]
            for signed in own:
                await directory.publish(signed)
            await trio.sleep(self._policy.directory_every_s if own else self._policy.news_every_s)


@cache
def software() -> str:
    """The name and version that we announce. It is read from disk once, since any peer may ask at any time."""
    return f"llmnode/{importlib.metadata.version('llmnode')}"
