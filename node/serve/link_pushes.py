"""The pushes that come over one link: rights to push that its peer asks for, and steps that it pushes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.node.serve.push_inlet import LinkGrants
from llmnode.wire.messages import RefusalCode, unpack
from llmnode.wire.push_messages import Pushed, PushLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import trio

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.node.serve.conduct import Conduct
    from llmnode.node.serve.push_inlet import PushDesk
    from llmnode.node.serve.served_span import ServeStats
    from llmnode.node.serve.session import ServerSession
    from llmnode.ports import Link
    from llmnode.wire.frame import Frame

log = logging.getLogger(__name__)


class LinkPushes:
    """`sessions` are all of the server, `desk`, `conduct`, `tally` and `on_bug` its own."""

    def __init__(
        self,
        link: Link,
        nursery: trio.Nursery,
        sessions: Mapping[SessionId, ServerSession],
        desk: PushDesk,
        conduct: Conduct,
        tally: ServeStats,
        on_bug: Callable[[PeerId, Exception], None],
    ) -> None:
        self._link = link
        self._sessions = sessions
        self._desk = desk
        self._conduct = conduct
        self._tally = tally
        self._used = 0
        """The pushes that were granted and came, since the last question. The peer counts each that it makes."""
        self._grants = LinkGrants(link, desk, nursery, on_bug)

    async def hear(self, frame: Frame) -> None:
        """The peer would push to a session, which need not be here yet.

        Raises RemoteProtocolError, and PeerRefused without memory for a frame that waits for its turn.
        """
        used, self._used = self._used, 0
        await self._conduct.wait_want(self._link, frame, used)
        self._grants.note(frame, unpack(PushLimit, frame.meta).limit_bytes)
        if (session := self._sessions.get(frame.session)) is not None:
            session.inbox.pushes.hear(self._grants)

    async def take(self, frame: Frame) -> None:
        """A step from the hop before, on the client's behalf. Its faults are not blamed on the client.

        One that was not granted costs its peer, if that knows grants. An older one pushes where its client says, until
        it is refused, and its client may be hostile. Raises PeerRefused for such a step, and RemoteProtocolError for a
        malformed one.
        """
        if frame.meta:  # out of a log it comes without
            unpack(Pushed, frame.meta)
        peer, session = self._link.peer, self._sessions.get(frame.session)
        if session is not None and session.inbox.pushes.sender == peer:
            try:
                if session.inbox.put_pushed(frame, self._grants):
                    self._tally.given_directly += 1
                    self._used += 1
                    return
            except (PeerRefused, RemoteProtocolError) as error:
                log.info("dropped a step pushed by peer=%s: %s", peer, error)
                # It was granted, so its peer may ask one question more for it, as for a push that is used.
                self._used += 1
                if isinstance(error, RemoteProtocolError):
                    session.inbox.pushes.expect(None)  # nor would the next one fit: their client made them so
                return
        if self._desk.is_late(peer, frame.size_bytes):
            log.debug("dropped a late step of peer=%s", peer)
            return
        if self._grants.has_asked:
            await self._conduct.note_unasked(self._link)
        raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "no session takes this step over this link")

    def close(self) -> None:
        """The link has ended."""
        self._grants.close()
