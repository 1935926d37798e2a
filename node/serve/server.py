"""Serves one span to any number of links.

A link's loop does nothing but hand frames on, so that a slow session holds up no other. What a session does is in
`session.py`; which frames it accepts, in `llmnode.wire.stage`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from llmnode.client.swarm import software
from llmnode.core.ids import NO_SESSION
from llmnode.core.span import Span
from llmnode.core.view import online
from llmnode.errors import PeerRefused, PeerUnreachable, RemoteProtocolError
from llmnode.node.serve.links import answer_about_swarm, serve_links
from llmnode.node.serve.session import ServedSession, Serving, Tally, refusal_of
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, Open, Pushed, RefusalCode, check_empty, pack, unpack
from llmnode.wire.payload import Codec, HiddenForm
from llmnode.wire.stage import Stage

if TYPE_CHECKING:
    from llmnode.client.connection import Connection
    from llmnode.client.pool import ConnectionPool
    from llmnode.client.swarm import Swarm
    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ServePolicy
    from llmnode.ports import Link, Network, Worker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Server:
    """What all links share."""

    worker: Worker
    model: ModelInfo
    policy: ServePolicy
    swarm: Swarm | None = None
    pushes: ConnectionPool | None = None
    """Connections over which results go to next hops; without them every hop goes through the client."""
    sessions: dict[SessionId, ServedSession] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    unreached: dict[PeerId, float] = field(default_factory=dict)
    """Until when we do not dial next hops that we could not reach: their sessions go by way of their clients."""

    async def run(self, network: Network) -> None:
        """Serve every link that is opened to us, until cancelled."""
        serving = Serving(self.worker, self.model, self.policy, network, self.find_peer, self.tally)
        await serve_links(network, self.policy.links, lambda link: _ServedLink(self, serving, link).run())

    async def find_peer(self, peer: PeerId) -> Connection:
        """A connection to push results over. Raises PeerError for one that has announced no part of our model, or
        that cannot be reached, which is found out once for all sessions.
        """
        known = self.swarm.view.of_model(self.model.digest) if self.swarm is not None else []
        addresses = next((each.addresses for each in online(known) if each.peer == peer), None)
        if self.pushes is None or addresses is None:
            raise PeerUnreachable("not known to serve this model", peer=peer)
        now_s = trio.current_time()
        if now_s < self.unreached.get(peer, 0.0):
            raise PeerUnreachable("could not be reached lately", peer=peer)
        try:
            with trio.fail_after(self.policy.connect_timeout_s):
                return await self.pushes.connect(addresses)
        except (PeerUnreachable, trio.TooSlowError):
            living = {each: until_s for each, until_s in self.unreached.items() if until_s > now_s}
            self.unreached = {**living, peer: now_s + self.policy.redial_s}
            raise PeerUnreachable("cannot be reached from here", peer=peer) from None

    def describe(self) -> Description:
        span = self.worker.span
        return Description(
            software=software(),
            model=self.model.name,
            model_digest=self.model.digest,
            blocks=self.model.blocks,
            hidden_size=self.model.hidden_size,
            context_tokens=self.model.context_tokens,
            dtype=self.model.dtype,
            span_start=span.start,
            span_end=span.end,
            kv_tokens_free=self.worker.kv_tokens_free,
            sessions=len(self.sessions),
            steps=self.tally.steps,
            steps_given_directly=self.tally.given_directly,
            results_pushed=self.tally.pushed,
        )


class _ServedLink:
    """One link and the sessions that were opened over it. They end with it."""

    def __init__(self, server: Server, serving: Serving, link: Link) -> None:
        self._server = server
        self._serving = serving
        self._link = link
        self._sessions: dict[SessionId, ServedSession] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            try:
                while True:
                    await self._handle(await self._link.receive(), nursery)
            finally:
                nursery.cancel_scope.cancel()

    async def _handle(self, frame: Frame, nursery: trio.Nursery) -> None:
        try:
            match frame.type:
                case FrameType.DESCRIBE:
                    check_empty(frame.meta, "DESCRIBE")
                    meta = pack(self._server.describe())
                    await self._link.send(Frame(FrameType.DESCRIPTION, step=frame.step, meta=meta))
                case FrameType.OPEN:
                    self._open(frame, nursery)
                case FrameType.STEP if frame.session not in self._sessions and self._is_pushed(frame):
                    self._take_push(frame)
                case FrameType.STEP | FrameType.TRUNCATE:
                    check_empty(frame.meta, frame.type.name)
                    self._session(frame).submit(frame)
                case FrameType.FORWARD | FrameType.REPLAY | FrameType.FORK:
                    self._session(frame).submit(frame)
                case FrameType.CLOSE:
                    check_empty(frame.meta, "CLOSE")
                    self._session(frame).close()
                case _:
                    await answer_about_swarm(self._server.swarm, self._link, frame)
        except PeerRefused as refusal:
            await self._link.send(refusal_of(frame, refusal.code, refusal.reason))
        except RemoteProtocolError as error:
            await self._link.send(refusal_of(frame, RefusalCode.BAD_MESSAGE, error.message))

    def _open(self, frame: Frame, nursery: trio.Nursery) -> None:
        span, request = self._check_open(frame)
        stage = Stage(frame.session, request.max_length, self._server.policy.steps_ahead, frame.epoch)
        form = HiddenForm(self._server.model.hidden_size, Codec(request.codec))
        session = ServedSession(
            stage, span, form, self._link, self._serving, self._sessions, keep_outputs=request.keep_outputs
        )
        self._sessions[frame.session] = session
        self._server.sessions[frame.session] = session
        nursery.start_soon(self._run_session, session)

    def _check_open(self, frame: Frame) -> tuple[Span, Open]:
        request, held, policy = unpack(Open, frame.meta), self._server.worker.span, self._server.policy
        if request.span_start >= request.span_end:
            raise RemoteProtocolError(f"[{request.span_start}, {request.span_end}) is no span")
        if frame.session == NO_SESSION or frame.step:
            raise RemoteProtocolError("OPEN names a session, and starts at step 0")
        span = Span(request.span_start, request.span_end)
        if frame.session in self._server.sessions:
            raise PeerRefused(RefusalCode.CONFLICT, "a session of this name is open")
        if request.model_digest != self._server.model.digest or request.dtype != self._server.model.dtype:
            raise PeerRefused(RefusalCode.WRONG_MODEL, f"this server holds {self._server.model.name}, of other weights")
        if request.codec not in list(Codec):
            raise PeerRefused(RefusalCode.UNKNOWN_CODEC, f"this server knows {', '.join(Codec)}")
        if not held.covers(span):
            raise PeerRefused(RefusalCode.SPAN_NOT_HELD, f"{span} asked for, {held} held")
        if request.max_length > self._server.model.context_tokens:
            raise PeerRefused(RefusalCode.NO_ROOM, f"the model's context is {self._server.model.context_tokens} tokens")
        if len(self._sessions) >= policy.sessions_per_link:
            raise PeerRefused(RefusalCode.BUSY, f"{len(self._sessions)} sessions are open over this link")
        return span, request

    async def _run_session(self, session: ServedSession) -> None:
        try:
            await session.run()
        finally:
            name = session.stage.session
            del self._sessions[name]
            with trio.CancelScope(shield=True):  # KV is freed whatever ends the session
                await self._server.worker.close(name)
            del self._server.sessions[name]

    def _is_pushed(self, frame: Frame) -> bool:
        session = self._server.sessions.get(frame.session)
        return session is not None and session.sender == self._link.peer

    def _take_push(self, frame: Frame) -> None:
        """A step from the hop before, on the client's behalf. What is wrong with it is not blamed on the client."""
        try:
            if frame.meta:  # out of a log it comes without
                unpack(Pushed, frame.meta)
            self._server.sessions[frame.session].submit(frame)
            self._server.tally.given_directly += 1
        except (PeerRefused, RemoteProtocolError) as error:
            log.info("dropped a step pushed by peer=%s: %s", self._link.peer, error)

    def _session(self, frame: Frame) -> ServedSession:
        session = self._sessions.get(frame.session)
        if session is None:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "no such session is open over this link")
        return session
