"""The links to a server: what comes over each, and what it does to the server and its sessions.

A link's loop does nothing but hand frames on, so that a slow session holds up no other. A session's work is in
`session.py`. `llmnode.wire.stage` decides which frames it accepts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import NO_SESSION
from llmnode.core.peers.dial_gate import scope_of
from llmnode.core.priority import PRIORITIES, Priority
from llmnode.core.serving.client_counters import Client
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, RemoteProtocolError
from llmnode.node.serve.link_adapters import REQUESTS as ADAPTERS
from llmnode.node.serve.link_adapters import LinkAdapters
from llmnode.node.serve.link_pushes import LinkPushes
from llmnode.node.serve.link_requests import LinkRequests
from llmnode.node.serve.links import accept_links, answer_any
from llmnode.node.serve.opened_terms import OpenedTerms
from llmnode.node.serve.passes import REQUESTS as PASSES
from llmnode.node.serve.passes import LinkPasses
from llmnode.node.serve.server import DRAINING, Server
from llmnode.node.serve.session import REQUESTS, ServerSession
from llmnode.wire import version_1
from llmnode.wire.deep_prompts import prompts_of_session
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Lease, Leased, OpenRequest, RefusalCode, check_empty, pack, unpack
from llmnode.wire.open_extensions import positions_at_once
from llmnode.wire.payload import Codec, HiddenForm
from llmnode.wire.profile import profile_of
from llmnode.wire.refusal import refusal_for
from llmnode.wire.stage import Stage

if TYPE_CHECKING:
    from llmnode.core.ids import SessionId
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.ports import Link
    from llmnode.wire.pass_messages import Pass

WORK = {FrameType.STEP, FrameType.WANT, FrameType.PART, *PASSES}
"""The frames that ask for work of the worker, which has limits of its own, and a question before a push, which has
turns of its own. An answer that cost the worker nothing takes a turn as well."""
MOST_NAMED = 256
"""The sessions that a link remembers to have opened or resumed last."""


async def serve_links(server: Server) -> None:
    """Serve every link that is opened to `server`, until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.drop_idle_adapters)
        nursery.start_soon(server.close_idle_sessions)
        await accept_links(
            server.network,
            server.policy.links,
            lambda link: ServerLink(server, link, nursery).run(),
            server.on_bug,
        )


class ServerLink:
    """One link, and what comes over it. `nursery` is that of the sessions."""

    def __init__(self, server: Server, link: Link, nursery: trio.Nursery) -> None:
        self._server = server
        self._link = link
        self._nursery = nursery
        mine, policy = (link, nursery, server.request_memory, server.conduct, server.on_bug), server.policy
        passes = LinkRequests(*mine, policy.passes_per_link, "pass")
        parts = LinkRequests(*mine, policy.adapter_parts_per_link, "part of an adapter")
        self._requests = passes, parts
        client = Client(link.group, link.peer)
        self._passes = LinkPasses(passes, client, self._served_for, server.begin_pass, server.end_pass)
        self._adapters = LinkAdapters(link, parts, server.holder_of)
        shared = server.sessions, server.desk, server.conduct, server.tally, server.on_bug
        self._pushes = LinkPushes(link, nursery, *shared)
        self._own: dict[SessionId, None] = {}
        """The sessions that were opened or resumed over it. They may have ended since, or answer over another link."""
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
            self._server.leave_link(self._sessions())

    def _sessions(self) -> list[ServerSession]:
        """Those that answer over this link."""
        known = self._server.sessions
        own = [each for name in self._own if (each := known.get(name)) is not None and each.way.now is self._link]
        self._own = {each.stage.session: None for each in own}
        return own

    async def _handle(self, frame: Frame) -> None:
        conduct = self._server.conduct
        try:
            if frame.type not in WORK:
                await conduct.wait_turn(self._link, frame)
            match frame.type:
                case FrameType.DESCRIBE:
                    check_empty(frame)
                    await self._describe(frame)
                case FrameType.OPEN:
                    self._open(frame)
                case FrameType.STEP if self._of_client(frame) is None and frame.session not in self._named:
                    await self._pushes.take(frame)
                case FrameType.STEP | FrameType.TRUNCATE:
                    check_empty(frame)
                    await self._session(frame).inbox.put(frame)
                case request if request in REQUESTS:
                    unpack(REQUESTS[request], frame.meta)  # here, where a malformed frame costs the link
                    await self._session(frame).inbox.put(frame)
                case request if request in PASSES:
                    self._passes.begin(frame)
                case request if request in ADAPTERS:
                    self._adapters.begin(frame)
                case FrameType.WANT:
                    await self._pushes.hear(frame)
                case FrameType.CLOSE:
                    check_empty(frame)
                    if frame.session == NO_SESSION:
                        self._passes.cancel(frame)
                    else:
                        self._session(frame).close()
                case FrameType.LEASE:
                    await self._link.send(self._lease(frame))
                case FrameType.RESUME:
                    await self._resume(frame)
                case _:
                    await answer_any(self._server.swarm, conduct, self._link, frame)
        except (PeerRefused, RemoteProtocolError) as error:
            refusal = refusal_for(frame, error)
            if frame.type in WORK:
                frame = refusal  # its payload is not kept meanwhile
                with suppress(PeerRefused):
                    await conduct.wait_turn(self._link, refusal)
            await self._link.send(refusal)
            if isinstance(error, RemoteProtocolError):
                await conduct.note_malformed(self._link)

    async def _describe(self, frame: Frame) -> None:
        server, up_to_now = self._server, scope_of(self._link.group) == "machine"
        said = server.describe(up_to_now=up_to_now)
        if frame.start:
            said = server.with_load(said, self._link, opens=bool(frame.length), up_to_now=up_to_now)
        answer = Frame(FrameType.DESCRIPTION, step=frame.step, meta=pack(said))
        await self._link.send(version_1.without_more(answer) if self._link.version == version_1.VERSION else answer)

    def _open(self, frame: Frame) -> None:
        self._name(frame.session)
        span, request, served = self._check_open(frame)
        stage = Stage(frame.session, request.max_length, self._server.policy.steps_ahead, frame.epoch)
        form = HiddenForm(self._server.model.hidden_size, Codec(request.codec))
        # A priority of a newer client keeps no session out, and gains it nothing either.
        sessions, priority = self._server.sessions, PRIORITIES.get(request.priority, max(Priority))
        prompts = prompts_of_session(frame, request, form.hidden_size, self._server.policy.session_prompt_bytes)
        at_once = positions_at_once(request)
        terms = OpenedTerms(span, form, profile_of(request), priority, request.keep_outputs, at_once)
        session = ServerSession(stage, terms, self._link, served, sessions)
        try:
            session.inbox.memory.hold_session()
            session.inbox.memory.hold_prompts(2 * prompts.size_bytes)  # here, and at the worker
            session.terms = terms.with_prompts(prompts.read(frame.payload))
        except PeerError:
            session.end()
            session.release()
            raise
        sessions[frame.session] = session
        self._own[frame.session] = None
        self._server.comers.note_opened(self._link.peer, self._link.group, frame.session, trio.current_time())
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
        most_s = 0.0 if session.inbox.memory.holds_prompts else self._server.policy.lease_s
        session.way.lease_s = min(request.lease_ms / 1000, most_s)
        if request.leaves:
            self._server.leave_link([session])
        meta = pack(Leased(int(1000 * session.way.lease_s)))
        return Frame(FrameType.LEASED, frame.session, frame.epoch, frame.step, meta=meta)

    def _name(self, session: SessionId) -> None:
        self._named.pop(session, None)
        self._named[session] = None
        if len(self._named) > MOST_NAMED:
            del self._named[next(iter(self._named))]

    async def _resume(self, frame: Frame) -> None:
        self._name(frame.session)
        check_empty(frame)
        session = self._server.sessions.get(frame.session)
        if session is None or session.client != self._link.peer:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "you have opened no such session")
        if session.way.now is not self._link:
            self._check_limits()
        self._own[frame.session] = None
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
            link = session.way.now
            session.end()
            try:
                with trio.CancelScope(shield=True):  # KV is freed whatever ends the session
                    await session.served.admission.leave(name)
            finally:
                session.release()
                del self._server.sessions[name]
                self._server.comers.note_ended(session.group, name)
                self._server.note_end()
        await session.say_farewell(link)

    def _of_client(self, frame: Frame) -> ServerSession | None:
        """The session of the frame, if it answers over this link."""
        session = self._server.sessions.get(frame.session)
        return session if session is not None and session.way.now is self._link else None

    def _session(self, frame: Frame) -> ServerSession:
        if (session := self._of_client(frame)) is None:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "no such session is open over this link")
        return session
