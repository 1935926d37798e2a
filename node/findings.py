"""The findings of `llmnode doctor`, and what it finds out from the words of peers. It asks nobody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.peers.absence import explain_absence
from llmnode.core.peers.clocks import CLOCK_FIX, judge_clocks
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.placement.precisions import describe_gaps, served_precisions
from llmnode.core.span import Span
from llmnode.core.view import online
from llmnode.node.text import counted
from llmnode.node.watching import DOUBLE_FIX, UNREAD, UPDATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo, PrecisionWish
    from llmnode.wire.messages import Description

OK, WARNING, BLOCKER = "ok", "warning", "blocker"
MOST_NAMED = 5
"""The most peers that are named for one fault: strangers may announce any number."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix` is empty if there is nothing to mend."""

    check: str
    verdict: str
    text: str
    fix: str = ""


def blocker_of(findings: Sequence[Finding]) -> Finding | None:
    """The blocker to fix first, since later ones may only follow from it."""
    return next((finding for finding in findings if finding.verdict == BLOCKER), None)


def check_unread(unread: int) -> list[Finding]:
    return [Finding("peers", WARNING, UNREAD.format(unread), UPDATE)] if unread else []


def check_clocks(offsets_ms: Mapping[PeerId, int], tolerated_s: float) -> list[Finding]:
    """Judges how far the clocks of peers are ahead of ours. It is ours that is wrong if most say so."""
    verdict = judge_clocks(offsets_ms, tolerated_s)
    if verdict.is_ours:
        return [Finding("clock", BLOCKER, verdict.text, verdict.fix)]
    limit = f"announcements tolerate {tolerated_s:g} s"
    findings: list[Finding] = []
    for peer in verdict.wrong:
        text = f"the clock of peer {peer} is off by {offsets_ms[peer] / 1000:+.1f} s; {limit}"
        findings.append(Finding("clock", WARNING, text, f"tell who runs it: {CLOCK_FIX}"))
    largest_ms = max((abs(each) for peer, each in offsets_ms.items() if peer not in verdict.wrong), default=0)
    right = f"{len(offsets_ms) - len(verdict.wrong)} of {len(offsets_ms)}"
    return [*findings, Finding("clock", OK, f"within {largest_ms} ms of the clocks of {right} peers; {limit}")]


def check_coverage(
    announcements: Sequence[Announcement], model: ModelInfo, wish: PrecisionWish, met: Mapping[PeerId, str]
) -> Finding:
    """Does the swarm hold this model, and all of it? No blocker: it may wait for us.

    `met` are the address groups of the peers that have answered.
    """
    served = served_precisions(model, online(announcements), wish, met)
    if served and served[0].is_whole:
        servers = counted(served[0].servers, "server")
        text = f"the swarm has all {model.blocks} blocks in {served[0].precision.name}, at {servers}"
        return Finding("peers", OK, text)
    if len(served) > 1:
        return Finding("peers", WARNING, describe_gaps(served), "start servers for them")
    precision, missing = wish.nearest, [Span(0, model.blocks)]
    if served:
        precision, missing = served[0].precision, list(served[0].missing)
    text = f"no server of the swarm has blocks {', '.join(map(str, missing))} of {model.name} in {precision.name}"
    why = explain_absence(replace(model, precision=precision), missing, announcements)
    if not why.text:
        return Finding("peers", WARNING, text, "start servers for them")
    return Finding("peers", WARNING, f"{text}; {why.text}", why.fix)


def check_named(described: Mapping[str, Description]) -> list[Finding]:
    """Checks the peers that were asked: all addresses of one peer must lead to one node."""
    findings: list[Finding] = []
    first: dict[str, str] = {}
    for address, answer in described.items():
        before = described[known := first.setdefault(peer_of(address), address)]
        if any(getattr(before, what) != getattr(answer, what) for what in ("model_digest", "span_start", "span_end")):
            text = f"two nodes use one identity: {known} and {address}"
            findings.append(Finding("double", WARNING, text, DOUBLE_FIX))
    return findings


def check_identities(announcements: Sequence[Announcement]) -> list[Finding]:
    """Reports identities that are used twice, as the servers have noticed themselves."""
    doubles = [each.peer for each in announcements if each.has_double][:MOST_NAMED]
    return [
        Finding("double", WARNING, f"two nodes use the identity of peer {peer}: others find one of them", DOUBLE_FIX)
        for peer in doubles
    ]
