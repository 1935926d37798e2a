"""A node writes down the peers that it knows while it runs, and reads them in its next run.

The disk may hang (`machine/cache_disk.py`): the node then goes on without them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import PeerState
from llmnode.core.policy import JoinPolicy
from llmnode.machine.cache_disk import in_time_or

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from llmnode.swarm.former_peers import FormerPeers
    from llmnode.swarm.membership import Swarm

NOT_RECALLED = "no peers of former runs are known"


async def recall(known: FormerPeers) -> list[list[str]]:
    """The addresses of each peer of former runs; none if the disk hangs."""
    return await in_time_or(partial(known.read, time.time()), [], NOT_RECALLED)


async def remember(swarm: Swarm, known: FormerPeers, policy: JoinPolicy | None = None) -> NoReturn:
    """Have `known` write the other peers of the view, now and then, and at the end, when this is cancelled."""
    every_s = (policy or JoinPolicy()).remember_every_s
    try:
        while True:
            await _write(known, swarm)
            await trio.sleep(every_s)
    finally:
        with trio.CancelScope(shield=True):
            await _write(known, swarm)


async def _write(known: FormerPeers, swarm: Swarm) -> None:
    await in_time_or(partial(known.write, _peers(swarm), time.time()), None, "the peers of this run are not remembered")


def _peers(swarm: Swarm) -> list[Sequence[str]]:
    """Addresses of the others. The peers that we have exchanged with ourselves come first: they were there."""
    known = [signed.announcement for signed in swarm.view.newer_than({})]
    return [each.addresses for each in known if each.offer.state is not PeerState.LEFT and each.peer != swarm.peer]
