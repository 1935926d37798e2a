"""Faults of a node that it learns from others while it runs, and that only its operator can mend.

Another node uses its identity, or its clock is wrong: other peers then do not find it, or find the other one, and none
of them can tell its operator. Knows neither the terminal nor JSON.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from llmnode.core.announcement import Announcement
    from llmnode.core.peers.clocks import ClockVerdict
    from llmnode.swarm.membership import Swarm

log = logging.getLogger(__name__)

DOUBLE_FIX = "start one of the two with another --identity FILE, or remove its file to have a new identity made"
UNREAD = "{} announcements cannot be read here: newer nodes have made them"
UPDATE = "get a newer llmnode"


@dataclass(frozen=True, slots=True)
class Notice:
    """`event` names the kind. `fix` is empty if it is over. `more` has further fields for programs."""

    event: str
    text: str
    fix: str
    more: Mapping[str, Any]  # Any: JSON


def log_notice(notice: Notice) -> None:
    """The default for programs: the notice goes to the log."""
    log.warning("%s%s", notice.text, notice.fix and f"; {notice.fix}")


async def watch(swarm: Swarm, report: Callable[[Notice], None]) -> NoReturn:
    """Report each fault when it begins, and when it is over."""
    told: set[str] = set()
    while True:
        await swarm.wait_noticed()
        clocks = swarm.judge_clocks()
        agrees = "" if clocks.wrong else "this machine's clock agrees with those of its peers again"
        for kind, notice, over in (
            ("identity", double_notice(swarm.double), "no other node uses this node's identity any more"),
            ("clock", clock_notice(clocks), agrees),
        ):
            if notice is not None and kind not in told:
                told.add(kind)
                report(notice)
            elif notice is None and over and kind in told:
                told.remove(kind)
                report(Notice(kind, over, "", {}))


def double_notice(double: Announcement | None) -> Notice | None:
    if double is None:
        return None
    where = " ".join(double.addresses) or "an address that it does not announce"
    text = f"another node uses this node's identity, at {where} for blocks {double.offer.span}: peers find one of them"
    span = [double.offer.span.start, double.offer.span.end]
    return Notice("identity", text, DOUBLE_FIX, {"addresses": list(double.addresses), "blocks": span})


def clock_notice(verdict: ClockVerdict) -> Notice | None:
    if not verdict.is_ours:
        return None
    more = {"ahead_s": -verdict.offset_s}
    return Notice("clock", f"{verdict.text}, so that others do not see this node", verdict.fix, more)
