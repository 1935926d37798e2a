"""A server that has answered no pass is held to what others of its blocks take, as soon as these are known.

A silent one then costs seconds, and not the time that the size of the pass allows. If nobody could take its place, it
has that time.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.errors import PeerTimeout, single_error
from llmnode.session.failures import Overdue
from llmnode.swarm.brought_adapters import BYTES_PER_S, PARTS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.peers.pass_patience import PassPatience, PassSize
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter

LOOKS_AGAIN_S = 1.0
"""Others may have answered for the first time, or have left."""


@asynccontextmanager
async def held_to_others(
    patience: PassPatience,
    connection: PeerConnection,
    size: PassSize,
    others: Callable[[], Sequence[PeerId]],
    adapter: Adapter | None,
) -> AsyncIterator[None]:
    """A context in which a server does a pass of this `size`, and gets the `adapter` before. `others` are those that
    could do the pass instead now.

    Raises Overdue if it is a stranger and takes much longer than they do. Then it rests (`PassPatience.resting`).
    """
    peer, began_s = connection.peer, trio.current_time()
    if patience.is_known(peer):
        yield
        return
    parts_bytes = [] if adapter is None else [len(each) for each in adapter.parts.values()]
    some_s = PARTS_AT_ONCE * max(parts_bytes, default=0) / BYTES_PER_S
    taken_before, ours_s = connection.adapters.taken_bytes, connection.lane.stopwatch()

    def until_s() -> float | None:
        """It has its time from when the last part or pass for it began to be sent, or from the last part of the adapter
        on that it took. All parts have a limit together, beside our own time. There is no limit while one waits for our
        uplink.

        Parts of other adapters, which may come first, count.
        """
        adapters, able = connection.adapters, others()
        if (most_s := patience.stranger_s(peer, size, able)) is None or connection.lane.waits:
            return None
        since_s = connection.lane.begun_s
        if adapters.heard_s > began_s:
            all_bytes = adapters.taken_bytes - taken_before + sum(parts_bytes)
            all_until_s = began_s + ours_s() + most_s + patience.stranger_parts_s(peer, all_bytes, able)
            since_s = min(max(since_s, adapters.heard_s + some_s), all_until_s)
        return max(began_s, since_s) + most_s

    async def watch() -> None:
        while (end_s := until_s()) is None or trio.current_time() < end_s:
            again_s = trio.current_time() + LOOKS_AGAIN_S
            await trio.sleep_until(again_s if end_s is None else min(end_s, again_s))
        scope.cancel()

    is_overdue = False
    with trio.CancelScope() as scope:
        try:
            with single_error():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch)
                    yield
                    nursery.cancel_scope.cancel()
        except PeerTimeout:
            is_overdue = patience.stranger_s(peer, size, others()) is not None
            if not is_overdue:
                raise
    if scope.cancelled_caught or is_overdue:
        now_s = trio.current_time()
        patience.note_overdue(peer, now_s - began_s, now_s)
        raise Overdue(f"no answer in {now_s - began_s:.1f} s: others need much less for such a pass", peer=peer)
