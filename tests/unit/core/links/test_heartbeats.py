"""A link's heartbeats have a burst and a rate, and the receiver of large frames may tell how fast they came."""

from __future__ import annotations

from llmnode.core.links.heartbeats import Heartbeats
from llmnode.core.policy import LinkPolicy

POLICY = LinkPolicy()


def taken(heartbeats: Heartbeats, sent_bytes: int, now_s: float) -> int:
    """The heartbeats that are allowed now."""
    number = 0
    while heartbeats.take(sent_bytes, now_s):
        number += 1
        assert number < 10_000
    return number


def test_those_that_are_due_are_always_allowed_also_after_a_pause_of_the_reader() -> None:
    heartbeats = Heartbeats(POLICY)
    for number in range(1000):
        assert heartbeats.take(0, 20.0 * (number // 10)), "ten come at once"


def test_a_flood_is_not_allowed() -> None:
    heartbeats = Heartbeats(POLICY)
    assert taken(heartbeats, 0, 0.0) == POLICY.heartbeats_burst
    rate = POLICY.heartbeats_each / POLICY.heartbeat_s
    assert taken(heartbeats, 0, 2.0) == 2 * rate
    assert taken(heartbeats, 0, 1000.0) == POLICY.heartbeats_burst


def test_each_measurement_of_what_we_send_may_be_told() -> None:
    heartbeats, sent_bytes = Heartbeats(POLICY), 0
    taken(heartbeats, 0, 0.0)
    for _ in range(1000):
        sent_bytes += POLICY.packing.rate_bytes
        assert taken(heartbeats, sent_bytes, 0.0) == 1
