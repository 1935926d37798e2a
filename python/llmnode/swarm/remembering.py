"""A node writes down the peers that it knows while it runs, for its next run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import PeerState
from llmnode.core.policy import JoinPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from llmnode.swarm.former_peers import FormerPeers
    from llmnode.swarm.membership import Swarm


async def remember(swarm: Swarm, known: FormerPeers, policy: JoinPolicy | None = None) -> NoReturn:
    """Have `known` write the other peers of the view, now and then, and at the end, when this is cancelled."""
    every_s = (policy or JoinPolicy()).remember_every_s
    try:
        while True:
            await trio.to_thread.run_sync(known.write, _peers(swarm), time.time())
            await trio.sleep(every_s)
    finally:
        known.write(_peers(swarm), time.time())


def _peers(swarm: Swarm) -> list[Sequence[str]]:
    """Addresses of the others. The peers that we have exchanged with ourselves come first: they were there."""
    known = [signed.announcement for signed in swarm.view.newer_than({})]
    return [each.addresses for each in known if each.offer.state is not PeerState.LEFT and each.peer != swarm.peer]
