"""The link over which a session answers, and how long the session waits for its client when that link is no more."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import trio

from llmnode.core.serving.leased_kv import Leased
from llmnode.errors import PeerError, PeerRefused
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.budget import Scope
    from llmnode.core.ids import SessionId
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.node.serve.session_memory import SessionMemory
    from llmnode.ports import Link
    from llmnode.wire.frame import Frame

log = logging.getLogger(__name__)


class SessionLink:
    """That of one session, whose task runs in `scope`."""

    def __init__(
        self,
        session: SessionId,
        link: Link,
        memory: SessionMemory,
        served: ServedSpan,
        end_other: Callable[[SessionId], None],
    ) -> None:
        """`end_other` ends another session of this server."""
        self.client, self.group = link.peer, link.group
        self.now: Link | None = link
        """None while the session waits for its client to come back, and when it has ended."""
        self.lease_s = 0.0
        """The time that the session outlives its link."""
        self.scope = trio.CancelScope()
        self._session = session
        self._memory = memory
        self._served = served
        self._end_other = end_other

    async def send(self, frame: Frame) -> None:
        """To the client, if it is there: what it does not hear now it may ask for again."""
        try:
            if self.now is not None:
                await self.now.send(frame)
        except PeerError as error:
            log.debug("not answered: %s", error)

    def leave(self) -> None:
        """The link is no more: the session ends, or waits for its client to come back, for its lease.

        Raises PeerRefused if there is no memory for it without a link. It ends then.
        """
        link, self.now = self.now, None
        if not self.lease_s or link is None:
            self.scope.cancel()
            return
        self.scope.deadline = trio.current_time() + self.lease_s
        self._count_within(self._served.network.budget.of_peer(link.scope))
        self.note_kv()

    def note_kv(self) -> None:
        """Its KV may have grown while it waits for its client. If all that wait hold too much, some of them end."""
        if not self.lease_s:
            return
        served = self._served
        lease = Leased(self._session, self.group, self.client, served.admission.held(self._session))
        for each in served.leased.put(lease, int(served.policy.leased_share * served.worker.kv_tokens)):
            self._end_other(each)

    def move(self, link: Link) -> None:
        """Answer over another link of the same client from now on. The lease is over.

        Raises PeerRefused if the session ends by now, or if there is no memory for it within the new link.
        """
        if self.scope.cancel_called:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "this session's lease is over")
        self._count_within(link.scope)
        self.now, self.lease_s = link, 0.0
        self._served.leased.remove(self._session)
        self.scope.deadline = math.inf

    def end(self) -> None:
        """The session has ended."""
        self.now = None
        self._served.leased.remove(self._session)

    def _count_within(self, around: Scope) -> None:
        """From now on the memory of the session counts there. Beyond its limit the session ends: raises PeerRefused."""
        try:
            self._memory.move(around)
        except PeerRefused:
            self.scope.cancel()
            raise
