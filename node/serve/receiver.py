"""The peer that takes the results of one session, if its client has named one: the next hop."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.peers.relaying import RelayBudget
from llmnode.errors import PeerError
from llmnode.node.serve.next_hops import no_next_hop

if TYPE_CHECKING:
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.ports import Link
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.frame import Frame
    from llmnode.wire.messages import Neighbours

log = logging.getLogger(__name__)


class Receiver:
    """At first there is none."""

    def __init__(self, served: ServedSpan) -> None:
        self._served = served
        self._found: tuple[PeerConnection, SessionId] | None = None
        self._relayed = RelayBudget(served.policy.relayed)
        self._asked_s: float | None = None  # since when a next hop is asked for that was not found

    async def find(self, request: Neighbours) -> None:
        """Have the one that the client names, or none. Raises PeerRefused if it cannot be had."""
        self._found = None
        if request.receiver == self._served.network.peer:
            raise no_next_hop(self._served.network.peer)
        if request.receiver:
            if not request.again or self._asked_s is None:
                self._asked_s = trio.current_time()
            peer = PeerId(request.receiver)
            connection = await self._served.next_hops.find(peer, self._asked_s, again=request.again)
            self._found = connection, SessionId(request.receiver_session)
            self._asked_s = None

    async def push(self, step: Frame, client: Link | None) -> bool:
        """Give it the step, which is for its session. False if it was not given: then it goes by way of the client."""
        if self._found is None:
            return False
        connection, session = self._found
        if connection.best.relayed and not self._may_relay(step, client):
            return False
        try:
            await connection.best.tell(replace(step, session=session))
        except PeerError as error:
            log.info("cannot push: %s", error)
            self._found = None
            return False
        return True

    def _may_relay(self, step: Frame, client: Link | None) -> bool:
        """Whether the step may go through a relay. Otherwise it goes by way of the client, if that is nearer."""
        if client is None or client.relayed:
            return True
        return self._relayed.allows(step.length, len(step.payload), trio.current_time())
