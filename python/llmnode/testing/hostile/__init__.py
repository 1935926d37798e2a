"""Hostile peers of a simulated world, in plans that a seed draws, and the laws that hold in spite of them."""

from llmnode.testing.hostile.clients import DialBait, Flooder, KvHog, QueueStuffer, SlowReader, ViewStuffer
from llmnode.testing.hostile.laws import (
    OPENS_WITHIN_S,
    check_dials,
    check_memory,
    check_no_wrong_ban,
    check_sessions_end_well,
    held_bytes,
)
from llmnode.testing.hostile.next_hops import HoleNamer, RightsAsker
from llmnode.testing.hostile.plan import ALL_ROLES, CLIENTS, SERVERS, HostilePlan
from llmnode.testing.hostile.role import HostileRole
from llmnode.testing.hostile.servers import (
    Evictor,
    Framer,
    GarbagePusher,
    HostileServers,
    NanServer,
    PassLiar,
    Refuser,
    Silent,
    SpeedLiar,
    SybilMajority,
    gradient_parts,
)

__all__ = [
    "ALL_ROLES",
    "CLIENTS",
    "OPENS_WITHIN_S",
    "SERVERS",
    "DialBait",
    "Evictor",
    "Flooder",
    "Framer",
    "GarbagePusher",
    "HoleNamer",
    "HostilePlan",
    "HostileRole",
    "HostileServers",
    "KvHog",
    "NanServer",
    "PassLiar",
    "QueueStuffer",
    "Refuser",
    "RightsAsker",
    "Silent",
    "SlowReader",
    "SpeedLiar",
    "SybilMajority",
    "ViewStuffer",
    "check_dials",
    "check_memory",
    "check_no_wrong_ban",
    "check_sessions_end_well",
    "gradient_parts",
    "held_bytes",
]
