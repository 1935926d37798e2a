"""Serves a span to any number of links, and another one after it.

Sessions belong to the server, and answer over a link: one that is leased may wait for its client to come back over
another. `server_link.py` has the links, and `session.py` a session's work.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.budget import Resource
from llmnode.core.identity import how_other
from llmnode.core.peers.asked_loads import LoadNow
from llmnode.core.serving.comers import Comers
from llmnode.core.serving.leased_kv import LeasedKv
from llmnode.core.span import Span
from llmnode.core.view import online_or_draining
from llmnode.errors import AdapterError, PeerRefused
from llmnode.node.serve.adapter_store import AdaptersTooLarge, AdapterStore
from llmnode.node.serve.admission import Admission
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.links import log_bug
from llmnode.node.serve.next_hops import NextHops
from llmnode.node.serve.push_inlet import PushDesk
from llmnode.node.serve.request_memory import RequestMemory
from llmnode.node.serve.served_span import ServedSpan, ServeStats
from llmnode.node.serve.session import ServerSession
from llmnode.node.serve.told_late import ToldLate, WorkDone
from llmnode.node.serve.work_turns import WorkTurns
from llmnode.swarm.membership import software
from llmnode.wire.load_now import load_extension
from llmnode.wire.messages import Description, RefusalCode
from llmnode.wire.profile import profile_fields
from llmnode.wire.server_figures import figures_extension

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from llmnode.core.adapters import AnnouncedAdapter
    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.model import ModelInfo, Profile
    from llmnode.core.policy import ServePolicy
    from llmnode.core.server_figures import ServerFigures
    from llmnode.ports import Link, Network, Worker
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.wire.adapter import Adapter

log = logging.getLogger(__name__)

DRAINING = "this server is draining"


@dataclass(slots=True)
class Server:
    """The state that all links share: sessions, and the span that is loaded now, if there is one."""

    network: Network
    model: ModelInfo
    policy: ServePolicy
    swarm: Swarm | None = None
    pushes: ConnectionPool | None = None
    """Connections over which results go to next hops; without them every hop goes through the client."""
    own_adapters: Mapping[AnnouncedAdapter, Adapter] = field(default_factory=dict)
    """Those that this node announces, and holds for its blocks."""
    sessions: dict[SessionId, ServerSession] = field(default_factory=dict)
    tally: ServeStats = field(default_factory=ServeStats)
    is_draining: bool = False
    on_bug: Callable[[PeerId, Exception], None] = log_bug
    """Told what nobody foresaw, which has ended a session or link of that peer; what it raises ends the server."""
    session_ended: trio.Event = field(default_factory=trio.Event)
    """The next end of a session or pass; then there is another event."""
    passes_of: Counter[str] = field(default_factory=Counter)
    """The passes that are under way, by address group."""
    prepared: AdapterStore | None = None
    """The adapters of the next worker to serve."""
    served: ServedSpan | None = None
    """None while no blocks are loaded: at first, after a worker was lost, and between two spans."""
    former: ServedSpan | None = None
    """The span before, while it goes on with the sessions and passes that it had."""
    span: Span | None = None
    """The blocks that are served, or that are being loaded."""
    figures: Callable[[], ServerFigures | None] = lambda: None
    """The prediction for this server, beside what it does. A peer that asks for its description is told."""
    work_turns: WorkTurns = field(default_factory=WorkTurns)
    leased: LeasedKv = field(default_factory=LeasedKv)
    comers: Comers = field(default_factory=Comers)
    """The clients that are about to open sessions, and those that have just done so."""
    next_hops: NextHops = field(init=False)
    desk: PushDesk = field(init=False)
    conduct: Conduct = field(init=False)
    request_memory: RequestMemory = field(init=False)
    _work_told: ToldLate[WorkDone] = field(init=False)
    _load_told: ToldLate[float] = field(init=False)

    def __post_init__(self) -> None:
        self.next_hops = NextHops(self.pushes, self._addresses, self.policy)
        self.desk = PushDesk(self.network.budget, self.policy)
        self.conduct = Conduct(self.policy, self._groups_at_work)
        self.request_memory = RequestMemory(self.policy)
        self._work_told = ToldLate(self.policy.totals_s)
        self._load_told = ToldLate(self.policy.totals_s)

    async def drop_idle_adapters(self) -> None:
        """Drop adapters that nothing used for a while, until cancelled."""
        while True:
            await trio.sleep(self.policy.adapter_idle_s / 2)
            for held in self._held():
                await held.adapters.drop_idle()

    async def close_idle_sessions(self) -> None:
        """Close each session that has had no frame for too long, until cancelled.

        A deadline of each session's own would be moved twice for each step.
        """
        idle_s = self.policy.session_idle_s
        while True:
            now_s = first_s = trio.current_time()
            for session in self.sessions.values():
                if (since_s := session.inbox.waits_since_s) + idle_s <= now_s:
                    log.info("session idle, closed peer=%s", session.client)
                    session.close()
                else:
                    first_s = min(first_s, since_s)
            await trio.sleep_until(first_s + idle_s)

    async def prepare(self, worker: Worker) -> None:
        """Have a worker hold the node's own adapters, before it serves. Raises what `AdapterStore.hold` does."""
        self.drop_prepared()
        self.prepared = AdapterStore(worker, self.model, self.policy, self.network.budget)
        for each, adapter in self.own_adapters.items():
            try:
                await self.prepared.hold(adapter)
            except AdapterError as error:
                self.drop_prepared()
                why = f"the adapter {each.name}: {error}"
                if isinstance(error, AdaptersTooLarge):
                    raise AdaptersTooLarge(why) from error
                why += f". Is it for {self.model.name}? Leave it out of --adapters if not"
                raise AdapterError(why) from error

    def drop_prepared(self) -> None:
        """The worker that was prepared does not serve."""
        if self.prepared is not None:
            self.prepared.close()
            self.prepared = None

    def serve(self, worker: Worker) -> None:
        """Open sessions with this worker from now on. Those of a worker that serves go on there, until `end_former`."""
        assert self.former is None, "there are two workers at most"
        if self.served is not None:
            self.former, self.served = self.served, None
            self.former.admission.close(f"this server holds blocks {worker.span} now")
        admission = Admission(worker, self.policy.admission)
        if (adapters := self.prepared) is None:
            adapters = AdapterStore(worker, self.model, self.policy, self.network.budget)
        self.prepared = None
        shared = self.network, self.next_hops, self.desk, self.tally, self.work_turns, self.conduct, self.leased
        self.served = ServedSpan(worker, admission, adapters, self.model, self.policy, *shared)
        self.span, self.is_draining = worker.span, False
        self._limit_logs()

    def refuse_sessions(self) -> None:
        """Open no sessions any more. Those that are open go on."""
        self.is_draining = True
        if self.served is not None:
            self.served.admission.close(DRAINING)

    def end_worker(self, then: Span) -> None:
        """The workers are lost, or about to be dropped: no session has any KV. The blocks of `then` are loaded next.

        Each session is there until its client hears of it at its next step, and for what it has logged.
        """
        self.span = then
        for held in self._held():
            self._end(held, f"this server is loading blocks {then}")
        self.served = self.former = None

    def end_former(self) -> None:
        """The former worker is about to be dropped: sessions that it still has, have no KV any more."""
        if self.former is not None:
            self._end(self.former, f"this server holds blocks {self.span} now")
            self.former = None
            self._limit_logs()

    def _end(self, held: ServedSpan, why: str) -> None:
        self.tally.former_busy_us += held.worker.busy_us
        held.admission.close(why)
        held.adapters.close()

    def _held(self) -> list[ServedSpan]:
        return [each for each in (self.served, self.former) if each is not None]

    def _limit_logs(self) -> None:
        kv_tokens = sum(each.worker.kv_tokens for each in self._held())
        self.network.budget.process.set_limit(Resource.LOGS, kv_tokens * self.model.row_bytes)

    def awaited(self, held: ServedSpan | None = None) -> int:
        """The sessions and passes whose clients are here: of one span, or of all that there were.

        Other sessions wait for their clients to come back.
        """
        sessions = [each for each in self.sessions.values() if each.way.now is not None and held in (None, each.served)]
        return len(sessions) + (self.passes if held is None else held.passes)

    async def drain(self, report: Callable[[int], None] = lambda _left: None, held: ServedSpan | None = None) -> None:
        """Wait until the sessions and passes whose clients are here have ended: see `awaited`.

        `report` is told how many are left, at first and whenever one has ended; never 0.
        """
        while left := self.awaited(held):
            report(left)
            await self.session_ended.wait()

    def _addresses(self, peer: PeerId) -> Sequence[str] | None:
        """None unless it has announced a part of our model."""
        known = None if self.swarm is None else self.swarm.view.of_peer(peer)
        if known is None or known.offer.profile.model_digest != self.model.digest or not online_or_draining([known]):
            return None
        return known.addresses

    def leave_link(self, sessions: Iterable[ServerSession]) -> None:
        """Their client is gone. A leased one may wait for it."""
        for session in sessions:
            with suppress(PeerRefused):  # then it ends
                session.way.leave()
        self.note_end()

    def begin_pass(self, held: ServedSpan, group: str) -> None:
        """A pass of this address group has begun there."""
        self.passes_of[group] += 1
        held.passes += 1

    def end_pass(self, held: ServedSpan, group: str) -> None:
        """It has ended."""
        self.passes_of[group] -= 1
        if not self.passes_of[group]:
            del self.passes_of[group]
        held.passes -= 1
        self.note_end()

    @property
    def passes(self) -> int:
        """The passes that are under way."""
        return self.passes_of.total()

    def _groups_at_work(self, since_s: float) -> Iterator[str]:
        """The address groups with passes under way, and with sessions that did not wait for a frame all the time."""
        yield from self.passes_of
        for session in self.sessions.values():
            if session.inbox.waits_since_s >= since_s:
                yield session.group

    def note_end(self) -> None:
        """A session or a pass has ended, or its client has."""
        self.session_ended.set()
        self.session_ended = trio.Event()

    def check_profile(self, asked: Profile) -> None:
        """Raises PeerRefused if the server has another model, or the model in another precision."""
        model = self.model
        if asked.model_digest != model.digest:
            how = how_other(asked.model_digest, model.digest, model.name)
            raise PeerRefused(RefusalCode.WRONG_MODEL, f"this server holds {model.name} {how}")
        if asked.precision != model.precision:
            why = f"this server holds {model.name} in {model.precision.name}, and {asked.precision.name} is asked for"
            raise PeerRefused(RefusalCode.WRONG_MODEL, why)
        if model.adapter not in (None, asked.adapter):
            raise PeerRefused(
                RefusalCode.UNKNOWN_ADAPTER, "this server has another adapter, and computes with it alone"
            )

    def holder_of(self, span: Span) -> ServedSpan:
        """The loaded blocks, of which `span` must be a part. Raises PeerRefused."""
        if self.served is None:
            raise PeerRefused(RefusalCode.BUSY, f"this server is loading blocks {self.span}")
        if not (held := self.served.worker.span).covers(span):
            double = self.swarm is not None and self.swarm.double is not None
            why = ": another node uses the identity of this one, and announces others" if double else ""
            raise PeerRefused(RefusalCode.SPAN_NOT_HELD, f"{span} asked for, {held} held{why}")
        return self.served

    def describe(self, *, up_to_now: bool = True) -> Description:
        """The description has the work done `up_to_now`, or for peers that must not see others work, of seconds ago."""
        worker, span, figures = None if self.served is None else self.served.worker, self.span, self.figures()
        assert span is not None, "a link is accepted once blocks are loaded"
        tally = self.tally
        busy_us = tally.former_busy_us + sum(each.worker.busy_us for each in self._held())
        counts = tally.steps, tally.given_directly, tally.pushed, tally.positions, busy_us
        work = WorkDone(*counts, **asdict(self.network.traffic))
        return Description(
            software=software(),
            model=self.model.name,
            **profile_fields(self.model.profile),
            blocks=self.model.blocks,
            hidden_size=self.model.hidden_size,
            context_tokens=self.model.context_tokens,
            span_start=span.start,
            span_end=span.end,
            kv_tokens_free=0 if worker is None else worker.kv_tokens_free,
            sessions=len(self.sessions),
            **asdict(self._work_told.of(work, up_to_now=up_to_now)),
            extensions=None if figures is None else figures_extension(figures),
        )

    def with_load(self, described: Description, link: Link, *, opens: bool, up_to_now: bool) -> Description:
        """The same for a client that asks for the load too, and perhaps is about to open a session."""
        now_s, served = trio.current_time(), self.served
        self.comers.note_asking(link.peer, link.group, now_s, opens=opens)
        load = 0.0 if served is None else served.worker.load
        load_now = LoadNow(
            self._load_told.of(load if up_to_now else round(load, 1), up_to_now=up_to_now),
            self.comers.fresh(link.peer, now_s),
            self.comers.asking(link.peer, now_s),
            0 if served is None else served.admission.free,
        )
        return replace(described, extensions={**(described.extensions or {}), **load_extension(load_now)})
