"""The peer that takes the results of one session, if its client has named one: the next hop."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.peers.relaying import RelayBudget
from llmnode.errors import PeerError
from llmnode.node.serve.next_hops import no_next_hop
from llmnode.node.serve.push_right import PushRight

if TYPE_CHECKING:
    from llmnode.core.ids import Epoch
    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.ports import Link
    from llmnode.wire.frame import Frame
    from llmnode.wire.messages import Neighbours

log = logging.getLogger(__name__)


class Receiver:
    """At first there is none."""

    def __init__(self, served: ServedSpan, group: str) -> None:
        """`group` is the address group of the session's client."""
        self._served = served
        self._group = group
        self._right: PushRight | None = None
        self._key = group, PeerId("")  # that its questions count for
        self._relayed = RelayBudget(served.policy.relayed)
        self._asked_s: float | None = None  # since when a next hop is asked for that was not found

    async def find(self, request: Neighbours, epoch: Epoch) -> None:
        """Have the one that the client names, or none. Raises PeerRefused if it cannot be had."""
        self.close()
        if request.receiver == self._served.network.peer:
            raise no_next_hop(self._served.network.peer)
        if request.receiver:
            if not request.again or self._asked_s is None:
                self._asked_s = trio.current_time()
            peer, hops = PeerId(request.receiver), self._served.next_hops
            connection = await hops.find(peer, self._group, self._asked_s, again=request.again)
            session, policy = SessionId(request.receiver_session), self._served.policy
            patience_s, may_ask = policy.push_patience_s, partial(hops.may_ask, self._group, peer)
            self._key = self._group, peer
            self._right = PushRight(connection, session, hops.numbers, patience_s, policy.push_again_s, may_ask)
            self._asked_s = None
            await self.prepare(epoch, 0)

    async def prepare(self, epoch: Epoch, size_bytes: int) -> None:
        """A step of this size is about to be pushed: have the right to it by then."""
        if self._right is not None and not (size_bytes and self._right.connection.only_relayed):  # see `push`
            try:
                await self._right.prepare(epoch, size_bytes)
            except PeerError as error:
                self._give_up(error)

    async def push(self, step: Frame, client: Link | None) -> bool:
        """Give it the step, which is for its session. False if it was not given: then it goes by way of the client."""
        if (right := self._right) is None:
            return False
        if right.connection.only_relayed and not self._may_relay(step, client):
            return False
        try:
            if not await right.get(step.epoch, step.size_bytes):
                return False
            await right.connection.best.tell(step.for_session(right.session))
        except PeerError as error:
            self._give_up(error)
            return False
        self._served.next_hops.returned[self._key] += 1
        return True

    def close(self) -> None:
        """There is none from now on."""
        if self._right is not None:
            self._right.close()
            if self._right.is_wanted:
                self._served.next_hops.returned[self._key] += 1  # it is not withdrawn any more
            self._right = None

    def _give_up(self, error: PeerError) -> None:
        log.info("cannot push: %s", error)
        self.close()

    def _may_relay(self, step: Frame, client: Link | None) -> bool:
        """Whether the step may go through a relay. Otherwise it goes by way of the client, if that is nearer."""
        if client is None or client.relayed:
            return True
        return self._relayed.allows(step.length, len(step.payload), trio.current_time())
