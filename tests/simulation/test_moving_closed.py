"""A session that is closed in the middle of a move to better servers leaves nothing at any server."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import MovePolicy
from llmnode.core.span import Span
from llmnode.errors import SessionClosed, SessionLost
from llmnode.wire.frame import Frame, FrameType
from simulation.beams import opened
from simulation.test_moving import FAST_S, MOVES, SLOW_S, start
from simulation.test_moving_rows import moves, never_truncates, until
from simulation.world import DELAY_S, SPANS, Dialogue, kv_is_free, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId

SOON = replace(MOVES, moves=MovePolicy(first_steps=4, look_s=1.0, tried_s=1.0))
CLOSED_AT = [
    (FrameType.OPENED, 0.0),
    (FrameType.RESULT, 0.0),
    (FrameType.TRUNCATED, 0.0),
    (FrameType.TRUNCATED, 1.5 * DELAY_S),
    (FrameType.TRUNCATED, 1.0),
]
"""A newcomer of a move sends this, and a session is closed that much later: when it opens, in the replay, when new hops
take their places, right after the client has heard of that, and when the move is over."""


async def close_in_a_move(closed: int, rows: int, at: tuple[FrameType, float], *, fails: bool) -> bool:
    """Close a row in a move, which `fails` in the end or not. The others go on, and nothing is left of it.

    Returns whether it had moved.
    """
    async with world() as swarm, trio.open_nursery() as nursery:
        swarm.said_prefill_share = 1 / SOON.chunk_tokens
        for name, span in (("slow", Span(0, 4)), ("last", SPANS[2])):
            await start(swarm, name, span, SLOW_S if name == "slow" else FAST_S)
        async with swarm.client(SOON) as (router, _), opened(router, rows, beside=True, max_length=60) as batch:
            session, has_come, is_closed, seen = batch[closed].session, trio.Event(), trio.Event(), Counter[FrameType]()

            def tamper(_peer: PeerId, frame: Frame) -> list[Frame]:
                seen[frame.type] += 1
                if frame.type is at[0] and seen[FrameType.OPENED] == 1 + rows:  # one was its trial
                    has_come.set()
                return never_truncates(frame) if fails else [frame]

            async def close() -> None:
                await trio.sleep(5)
                fast = [await start(swarm, str(place), SPANS[place], FAST_S / 10) for place in range(2)]
                fast[1].network.tamper = tamper
                await has_come.wait()
                await trio.sleep(at[1])
                await session.close()
                is_closed.set()

            async def step(row: Dialogue) -> None:
                with suppress(SessionClosed, SessionLost) if row is batch[closed] else nullcontext():
                    await row.step(1)

            nursery.start_soon(close)
            steps_after = 3
            while steps_after:
                steps_after -= is_closed.is_set()
                async with trio.open_nursery() as steps:
                    for row in batch:
                        steps.start_soon(step, row)
            left = [row for row in batch if row.session is not session]
            assert moves(left) in ([not fails], [])
            assert not any(row.session.recoveries for row in left)
            hops = sum(len(row.session.route) for row in left)
            await until(lambda: sum(len(node.server.sessions) for node in swarm.nodes.values()) == hops)
        await kv_is_free(swarm)
        return bool(session.moves)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("rows", "closed"), [(1, 0), (2, 0), (2, 1)])
@simulated
async def test_a_session_that_is_closed_in_a_move_leaves_nothing_at_any_server(
    rows: int, closed: int, fails: bool
) -> None:
    """One hop makes way for two, and the one after them stays."""
    has_moved = [await close_in_a_move(closed, rows, at, fails=fails) for at in CLOSED_AT]
    assert not any(has_moved[:2]) and has_moved[-1] != fails
