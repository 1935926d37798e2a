"""Serves a span to any number of links, and another one after it.

Sessions belong to the server, and answer over a link: one that is leased may wait for its client to come back over
another. A link's loop does nothing but hand frames on, so that a slow session holds up no other. A session's work is in
`session.py`. `llmnode.wire.stage` decides which frames it accepts.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import trio

from llmnode.core.budget import Resource
from llmnode.core.identity import how_other
from llmnode.core.ids import NO_SESSION
from llmnode.core.priority import PRIORITIES, Priority
from llmnode.core.span import Span
from llmnode.core.view import online_or_draining
from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.node.serve.adapter_store import AdapterStore
from llmnode.node.serve.admission import Admission
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.link_adapters import REQUESTS as ADAPTERS
from llmnode.node.serve.link_adapters import LinkAdapters
from llmnode.node.serve.link_pushes import LinkPushes
from llmnode.node.serve.link_requests import LinkRequests
from llmnode.node.serve.links import accept_links, answer_about_swarm, log_bug
from llmnode.node.serve.next_hops import NextHops
from llmnode.node.serve.passes import REQUESTS as PASSES
from llmnode.node.serve.passes import LinkPasses
from llmnode.node.serve.push_inlet import PushDesk
from llmnode.node.serve.served_span import ServedSpan, ServeStats
from llmnode.node.serve.session import REQUESTS, Asked, ServerSession
from llmnode.node.serve.work_turns import WorkTurns
from llmnode.swarm.membership import software
from llmnode.wire import version_1
from llmnode.wire.deep_prompts import prompts_of_session
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, Lease, Leased, OpenRequest, RefusalCode, check_empty, pack, unpack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec, HiddenForm
from llmnode.wire.profile import profile_fields, profile_of
from llmnode.wire.refusal import refusal_for
from llmnode.wire.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.model import ModelInfo, Profile
    from llmnode.core.policy import ServePolicy
    from llmnode.ports import Link, Network, Worker
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)

DRAINING = "this server is draining"
MOST_NAMED = 256
"""The sessions that a link remembers to have opened or resumed last."""


@dataclass(slots=True)
class Server:
    """The state that all links share: sessions, and the span that is loaded now, if there is one."""

    network: Network
    model: ModelInfo
    policy: ServePolicy
    swarm: Swarm | None = None
    pushes: ConnectionPool | None = None
    """Connections over which results go to next hops; without them every hop goes through the client."""
    sessions: dict[SessionId, ServerSession] = field(default_factory=dict)
    tally: ServeStats = field(default_factory=ServeStats)
    is_draining: bool = False
    on_bug: Callable[[PeerId, Exception], None] = log_bug
    """Told what nobody foresaw, which has ended a session or link of that peer; what it raises ends the server."""
    session_ended: trio.Event = field(default_factory=trio.Event)
    """The next end of a session or pass; then there is another event."""
    passes: int = 0
    """The passes that are under way."""
    served: ServedSpan | None = None
    """None while no blocks are loaded: at first, after a worker was lost, and between two spans."""
    span: Span | None = None
    """The blocks that are served, or that are being loaded."""
    work_turns: WorkTurns = field(default_factory=WorkTurns)
    next_hops: NextHops = field(init=False)
    desk: PushDesk = field(init=False)
    conduct: Conduct = field(init=False)

    def __post_init__(self) -> None:
        self.next_hops = NextHops(self.pushes, self._addresses, self.policy)
        self.desk = PushDesk(self.network.budget, self.policy)
        self.conduct = Conduct(self.policy)

    async def run(self) -> None:
        """Serve every link that is opened to us, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drop_idle_adapters)
            await accept_links(
                self.network, self.policy.links, lambda link: ServerLink(self, link, nursery).run(), self.on_bug
            )

    async def _drop_idle_adapters(self) -> None:
        while True:
            await trio.sleep(self.policy.adapter_idle_s / 2)
            if self.served is not None:
                await self.served.adapters.drop_idle()

    def serve(self, worker: Worker) -> None:
        """Open sessions with this worker from now on."""
        assert self.served is None, "the former worker is ended first"
        admission = Admission(worker, self.policy.admission)
        adapters = AdapterStore(worker, self.model, self.policy, self.network.budget)
        self.network.budget.process.set_limit(Resource.LOGS, worker.kv_tokens * self.model.row_bytes)
        shared = self.network, self.next_hops, self.desk, self.tally, self.work_turns
        self.served = ServedSpan(worker, admission, adapters, self.model, self.policy, *shared)
        self.span, self.is_draining = worker.span, False

    def refuse_sessions(self) -> None:
        """Open no sessions any more. Those that are open go on."""
        self.is_draining = True
        if self.served is not None:
            self.served.admission.close(DRAINING)

    def end_worker(self, then: Span) -> None:
        """The worker is lost, or about to be dropped: no session has any KV. The blocks of `then` are loaded next.

        Each session is there until its client hears of it at its next step, and for what it has logged.
        """
        self.span = then
        if self.served is not None:
            self.tally.former_busy_us += self.served.worker.busy_us
            self.served.admission.close(f"this server is loading blocks {then}")
            self.served.adapters.close()
            self.served = None

    @property
    def awaited(self) -> int:
        """The sessions and passes whose clients are here. Other sessions wait for their clients to come back."""
        return sum(session.link is not None for session in self.sessions.values()) + self.passes

    async def drain(self, report: Callable[[int], None] = lambda _left: None) -> None:
        """Wait until the sessions and passes whose clients are here have ended.

        `report` is told how many are left, at first and whenever one has ended; never 0.
        """
        while left := self.awaited:
            report(left)
            await self.session_ended.wait()

    def _addresses(self, peer: PeerId) -> Sequence[str] | None:
        """None unless it has announced a part of our model."""
        known = self.swarm.view.of_model(self.model.digest) if self.swarm is not None else []
        return next((each.addresses for each in online_or_draining(known) if each.peer == peer), None)

    def leave_link(self, session: ServerSession) -> None:
        """Its client is gone. It may wait for it, if all that do, or those of this client, do not hold too much KV."""
        waiting = [session, *(each for each in self.sessions.values() if each.link is None)]
        may_hold = self.policy.leased_share * session.served.worker.kv_tokens
        of_client = _positions(each for each in waiting if each.client == session.client)
        if _positions(waiting) > may_hold or of_client > self.policy.leased_client_share * may_hold:
            session.lease_s = 0.0
        with suppress(PeerRefused):  # then it ends
            session.leave_link()
        self.note_end()

    def count_passes(self, more: int) -> None:
        """This number of passes have begun, or ended if it is negative."""
        self.passes += more
        if more < 0:
            self.note_end()

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

    def describe(self) -> Description:
        worker, span = None if self.served is None else self.served.worker, self.span
        assert span is not None, "a link is accepted once blocks are loaded"
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
            steps=self.tally.steps,
            steps_given_directly=self.tally.given_directly,
            results_pushed=self.tally.pushed,
            positions=self.tally.positions,
            busy_us=self.tally.former_busy_us + (0 if worker is None else worker.busy_us),
            **asdict(self.network.traffic),
        )


class ServerLink:
    """One link, and what comes over it. `nursery` is that of the sessions."""

    def __init__(self, server: Server, link: Link, nursery: trio.Nursery) -> None:
        self._server = server
        self._link = link
        self._nursery = nursery
        mine, policy = (link, nursery, server.conduct, server.on_bug), server.policy
        passes = LinkRequests(*mine, policy.passes_per_link, "pass")
        parts = LinkRequests(*mine, policy.adapter_parts_per_link, "part of an adapter")
        self._requests = passes, parts
        self._passes = LinkPasses(passes, link.peer, self._served_for, server.count_passes)
        self._adapters = LinkAdapters(link, parts, server.holder_of)
        shared = server.sessions, server.desk, server.conduct, server.tally, server.on_bug
        self._pushes = LinkPushes(link, nursery, *shared)
        self._named: dict[SessionId, None] = {}
        """The sessions that this peer opened or resumed. It may not have heard yet that one was refused or ended."""

    async def run(self) -> None:
        try:
            while True:
                await self._handle(await self._link.receive())
        finally:
            for requests in self._requests:
                requests.close()
            self._pushes.close()
            for session in self._sessions():
                self._server.leave_link(session)

    def _sessions(self) -> list[ServerSession]:
        """Those that answer over this link."""
        return [session for session in self._server.sessions.values() if session.link is self._link]

    async def _handle(self, frame: Frame) -> None:
        try:
            match frame.type:
                case FrameType.DESCRIBE:
                    check_empty(frame.meta, "DESCRIBE")
                    answer = Frame(FrameType.DESCRIPTION, step=frame.step, meta=pack(self._server.describe()))
                    if self._link.version == version_1.VERSION:
                        answer = version_1.without_more(answer)
                    await self._link.send(answer)
                case FrameType.OPEN:
                    self._open(frame)
                case FrameType.STEP if self._of_client(frame) is None and frame.session not in self._named:
                    await self._pushes.take(frame)
                case FrameType.STEP | FrameType.TRUNCATE:
                    check_empty(frame.meta, frame.type.name)
                    await self._session(frame).inbox.put(frame)
                case request if request in REQUESTS:
                    unpack(REQUESTS[request], frame.meta)  # here, where a malformed frame costs the link
                    await self._session(frame).inbox.put(frame)
                case request if request in PASSES:
                    self._passes.begin(frame)
                case request if request in ADAPTERS:
                    self._adapters.begin(frame)
                case FrameType.WANT:
                    self._pushes.hear(frame)
                case FrameType.CLOSE:
                    check_empty(frame.meta, "CLOSE")
                    if frame.session == NO_SESSION:
                        self._passes.cancel(frame)
                    else:
                        self._session(frame).close()
                case FrameType.LEASE:
                    await self._link.send(self._lease(frame))
                case FrameType.RESUME:
                    await self._resume(frame)
                case _:
                    await answer_about_swarm(self._server.swarm, self._link, frame)
        except (PeerRefused, RemoteProtocolError) as error:
            await self._link.send(refusal_for(frame, error))
            if isinstance(error, RemoteProtocolError):
                await self._server.conduct.note_malformed(self._link)

    def _open(self, frame: Frame) -> None:
        self._name(frame.session)
        span, request, served = self._check_open(frame)
        stage = Stage(frame.session, request.max_length, self._server.policy.steps_ahead, frame.epoch)
        form = HiddenForm(self._server.model.hidden_size, Codec(request.codec))
        # A priority of a newer client keeps no session out, and gains it nothing either.
        sessions, priority = self._server.sessions, PRIORITIES.get(request.priority, max(Priority))
        prompts = prompts_of_session(frame, request, form.hidden_size, self._server.policy.session_prompt_bytes)
        asked = Asked(span, form, profile_of(request), priority, request.keep_outputs, prompts)
        sessions[frame.session] = session = ServerSession(stage, asked, self._link, served, sessions)
        self._nursery.start_soon(self._run_session, session)

    def _check_open(self, frame: Frame) -> tuple[Span, OpenRequest, ServedSpan]:
        request = unpack(OpenRequest, frame.meta)
        if request.span_start >= request.span_end:
            raise RemoteProtocolError(f"[{request.span_start}, {request.span_end}) is no span")
        if frame.session == NO_SESSION or frame.step:
            raise RemoteProtocolError("OPEN names a session, and starts at step 0")
        span = Span(request.span_start, request.span_end)
        if frame.session in self._server.sessions:
            raise PeerRefused(RefusalCode.CONFLICT, "a session of this name is open")
        self._server.check_profile(profile_of(request))
        if request.codec not in list(Codec):
            raise PeerRefused(RefusalCode.UNKNOWN_CODEC, f"this server knows {', '.join(Codec)}")
        served = self._server.holder_of(span)
        if request.max_length > self._server.model.context_tokens:
            raise PeerRefused(RefusalCode.NO_ROOM, f"the model's context is {self._server.model.context_tokens} tokens")
        self._check_limits()
        return span, request, served

    def _served_for(self, request: Pass) -> ServedSpan:
        """The blocks for a pass. Raises PeerRefused."""
        self._server.check_profile(profile_of(request))
        if self._server.is_draining:
            raise PeerRefused(RefusalCode.BUSY, DRAINING)
        return self._server.holder_of(Span(request.span_start, request.span_end))

    def _check_limits(self) -> None:
        if self._server.is_draining:
            raise PeerRefused(RefusalCode.BUSY, DRAINING)
        if (sessions := len(self._sessions())) >= self._server.policy.sessions_per_link:
            raise PeerRefused(RefusalCode.BUSY, f"{sessions} sessions are open over this link")

    def _lease(self, frame: Frame) -> Frame:
        request, session = unpack(Lease, frame.meta), self._session(frame)
        session.lease_s = min(request.lease_ms / 1000, self._server.policy.lease_s)
        if request.leaves:
            self._server.leave_link(session)
        meta = pack(Leased(int(1000 * session.lease_s)))
        return Frame(FrameType.LEASED, frame.session, frame.epoch, frame.step, meta=meta)

    def _name(self, session: SessionId) -> None:
        self._named.pop(session, None)
        self._named[session] = None
        if len(self._named) > MOST_NAMED:
            del self._named[next(iter(self._named))]

    async def _resume(self, frame: Frame) -> None:
        self._name(frame.session)
        check_empty(frame.meta, "RESUME")
        session = self._server.sessions.get(frame.session)
        if session is None or session.client != self._link.peer:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "you have opened no such session")
        if session.link is not self._link:
            self._check_limits()
        await session.move(self._link, frame)

    async def _run_session(self, session: ServerSession) -> None:
        try:
            await self._run_to_its_end(session)
        except Exception as error:  # noqa: BLE001  one client's bad luck is not to cost all others their sessions
            self._server.on_bug(session.client, error)

    async def _run_to_its_end(self, session: ServerSession) -> None:
        name = session.stage.session
        try:
            await session.run()
        finally:
            link = session.link
            session.end()
            try:
                with trio.CancelScope(shield=True):  # KV is freed whatever ends the session
                    await session.served.admission.leave(name)
            finally:
                session.release()
                del self._server.sessions[name]
                self._server.note_end()
        await session.say_farewell(link)

    def _of_client(self, frame: Frame) -> ServerSession | None:
        """The session of the frame, if it answers over this link."""
        session = self._server.sessions.get(frame.session)
        return session if session is not None and session.link is self._link else None

    def _session(self, frame: Frame) -> ServerSession:
        if (session := self._of_client(frame)) is None:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "no such session is open over this link")
        return session


def _positions(sessions: Iterable[ServerSession]) -> int:
    """That they have KV for."""
    return sum(each.stage.max_length for each in sessions)
