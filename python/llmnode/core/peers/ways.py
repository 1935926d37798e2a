"""The ways between servers, as they announce them, as far as a client believes them. Knows no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.route import Ways


def believed_ways(announcements: Iterable[Announcement], round_trips_s: Mapping[PeerId, float]) -> Ways:
    """The time of one way between two servers, in both directions: half of a round trip that one of them announces.

    If both do, the longer one counts. `round_trips_s` are those that this client has measured to servers. By the
    triangle inequality, two servers are no nearer to each other than the difference of these. So a distant server
    cannot say that it is next to one that is near to the client. A way counts only if the client has measured both of
    its servers: others may be anywhere, and a stranger can announce any number of them.
    """
    ways: dict[tuple[PeerId, PeerId], float] = {}
    for each in announcements:
        if (mine_s := round_trips_s.get(each.peer)) is None:
            continue
        for other, round_trip_us in each.offer.speed.round_trips_us:
            if (theirs_s := round_trips_s.get(other)) is None:
                continue
            way_s = max(round_trip_us / 1e6, abs(mine_s - theirs_s)) / 2
            for pair in ((each.peer, other), (other, each.peer)):
                ways[pair] = max(way_s, ways.get(pair, 0.0))
    return ways
