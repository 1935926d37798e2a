"""A look at a swarm from outside: the announced servers, and the answers of those that can be reached."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.whereabouts import in_turns
from llmnode.core.policy import RoutePolicy
from llmnode.errors import ConfigError, PeerError
from llmnode.node.status import ServerReport, by_model
from llmnode.wire.server_figures import figures_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.peers.clocks import ClockVerdict
    from llmnode.node.status import ModelStatus
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

ASKED_AT_ONCE = 32
ASKED_FOR_S = 12.0


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a swarm at one time. `unread` counts announcements that this version cannot read."""

    models: Sequence[ModelStatus]
    clocks: ClockVerdict
    unread: int


async def look_at(pool: ConnectionPool, swarm: Swarm, most_s: float = ASKED_FOR_S) -> Look:
    """Ask all announced servers, for `most_s` seconds.

    Address groups have turns, and there is a limit for all: strangers can announce any number of servers.
    """
    answers: dict[PeerId, ServerReport] = {}
    timeout_s = RoutePolicy().connect_timeout_s

    async def describe(each: Announcement) -> None:
        with suppress(PeerError, ConfigError), trio.move_on_after(timeout_s):
            connection = await pool.connect(each.addresses)
            asked_s = trio.current_time()
            description = await connection.describe(timeout_s)
            at_s = trio.current_time()
            round_trip_us, figures = int((at_s - asked_s) * 1e6), figures_of(description)
            answers[each.peer] = ServerReport(description, connection.relayed, round_trip_us, figures, at_s)

    async def describe_next(waiting: Iterator[Announcement]) -> None:
        for each in waiting:
            await describe(each)

    announcements = swarm.view.announcements()
    shuffled = random.sample(announcements, len(announcements))
    waiting = iter(in_turns([each for each in shuffled if each.addresses], swarm.met_in()))
    with trio.move_on_after(most_s):
        async with trio.open_nursery() as nursery:
            for _ in range(ASKED_AT_ONCE):
                nursery.start_soon(describe_next, waiting)
    return Look(by_model(announcements, answers), swarm.judge_clocks(), swarm.unread)
