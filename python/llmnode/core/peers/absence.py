"""Why nobody is there to compute some blocks, as far as announcements tell, and what the one who asks can do.

Knows no network: what is announced is told, a sentence is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.identity import explain_difference, is_variant
from llmnode.core.peers.clocks import CLOCK_FIX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.peers.clocks import ClockVerdict
    from llmnode.core.span import Span

NAMED = 5
"""The most models, precisions and peers that a message names: any peer may announce any number."""
TOLD_AGAIN_S = 10.0
"""A client that goes on searching says the same reason again after this time."""
MOST_TOLD = 4
"""The most reasons that it says within that time: peers may give a new one at every look."""


@dataclass(frozen=True, slots=True)
class Absence:
    """`text` says what there is instead of what is missing; `fix` tells the user what to do."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}: {self.fix}" if self.text else self.fix


class ToldReasons:
    """The reasons for which a client found no peer, as it has told them to its user lately: none twice."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}

    def is_news(self, reason: str, now_s: float) -> bool:
        """Whether to tell the `reason`, which counts as told then."""
        self._told_s = {each: told_s for each, told_s in self._told_s.items() if now_s - told_s < TOLD_AGAIN_S}
        if reason in self._told_s or len(self._told_s) >= MOST_TOLD:
            return False
        self._told_s[reason] = now_s
        return True


def explain_absence(
    model: ModelInfo,
    missing: Sequence[Span],
    announcements: Sequence[Announcement],
    *,
    positions: int = 0,
    clocks: ClockVerdict | None = None,
    excluded: Collection[PeerId] = (),
    failed: Collection[PeerId] = (),
) -> Absence:
    """Why a session of `positions` finds no peer for the blocks `missing`. The first cause that there is counts.

    `excluded` are peers that are not used because they are suspected of wrong results, `failed` those that were tried.
    """
    if clocks is not None and clocks.is_ours:
        return Absence(f"{clocks.text}, so what others announce counts for nothing here", clocks.fix)
    ours = [each for each in announcements if each.offer.profile.model_digest == model.digest]
    holders = [each for each in ours if any(_overlap(each.offer.span, span) for span in missing)]
    found = (
        _of_holders([each for each in holders if each.offer.computes(model.profile)], positions, excluded, failed)
        or _of_precisions(model, holders)
        or _of_adapters(model, holders)
        or _of_doubles(ours)
        or _of_variants(model, [each for each in announcements if each not in ours])
        or _of_others(model, announcements)
        or _of_wrong_clocks(clocks)
    )
    if found is not None:
        return found
    if not announcements:
        return Absence("the peers that answer know of no server at all", "start some with --peers, or name other peers")
    return Absence("", "start a server for them or name more peers with --peers")


def _of_holders(
    holders: Sequence[Announcement], positions: int, excluded: Collection[PeerId], failed: Collection[PeerId]
) -> Absence | None:
    """The cause if servers hold the blocks, but announce too little or have failed."""
    online = [each for each in holders if each.offer.state is PeerState.ONLINE]
    if usable := [each for each in online if each.peer not in excluded]:
        largest = max(each.offer.kv_tokens for each in usable)
        if largest >= positions:
            tried = [each.peer for each in usable if each.peer in failed]
            text = _agreed(tried, "announces some, and has failed", "announce some, and have failed")
            seen = "it runs" if _are_one(tried) else "they run"
            return Absence(text, f"see that {seen} and can be reached, or start another server") if tried else None
        text = f"{positions} positions are asked for, and the KV of those that hold some is for {largest} at most"
        return Absence(text, "ask for fewer, or start servers with more --kv-tokens")
    if online:
        would = "would have some, but gave results that others contradict"
        text = _agreed([each.peer for each in online], would, would)
        return Absence(text, "start servers that you trust, or try again in some minutes")
    if joining := [each for each in holders if each.offer.state is PeerState.JOINING]:
        loading = [each.peer for each in joining]
        ready = "it is ready" if _are_one(loading) else "they are ready"
        return Absence(_agreed(loading, "still loads them", "still load them"), f"try again in a moment, when {ready}")
    if newer := [each for each in holders if each.offer.state is PeerState.UNKNOWN]:
        state = "in a state that this llmnode does not know"
        text = _agreed([each.peer for each in newer], f"has some, {state}", f"have some, {state}")
        return Absence(text, "get a newer llmnode, or start servers for them")
    if holders:
        leaving = [each.peer for each in holders]
        text = _agreed(leaving, "has some, but is about to stop", "have some, but are about to stop")
        return Absence(text, "start another server for them")
    return None


def _of_precisions(model: ModelInfo, holders: Sequence[Announcement]) -> Absence | None:
    online = [each for each in holders if each.offer.state is PeerState.ONLINE]
    others = {each.offer.profile.precision.name: each.offer.profile.precision for each in online}
    others.pop(model.precision.name, None)
    names = sorted(others)[:NAMED]
    if not names:
        return None
    text = f"some are held in {', '.join(names)}, and {model.precision.name} is asked for"
    if not (held := others[names[0]]).is_known:
        return Absence(text, "get a newer llmnode, or start servers for them")
    options = f"--dtype {held.dtype} --quant {held.quant} --kv-dtype {held.kv_dtype}"
    return Absence(text, f"give {options}, or start servers for them")


def _of_adapters(model: ModelInfo, holders: Sequence[Announcement]) -> Absence | None:
    """The cause if the blocks are held, and the adapter that the client names is not."""
    base = replace(model.profile, adapter=None)
    without = [each.peer for each in holders if each.offer.state is PeerState.ONLINE and each.offer.profile == base]
    if model.adapter is None or not without:
        return None
    adapter = f"announce the adapter {model.adapter.hex()}"
    text = _agreed(without, f"holds some, and does not {adapter}", f"hold some, and do not {adapter}")
    return Absence(text, "give the folder of the adapter, or have such a server started with --adapters FOLDER")


def _of_doubles(ours: Sequence[Announcement]) -> Absence | None:
    if doubles := [each.peer for each in ours if each.has_double]:
        each_of = "" if _are_one(doubles) else "each of "
        text = f"two nodes use the identity of {each_of}{_named(doubles)}, and only one of them is found at a time"
        return Absence(text, "have one of the two started with another --identity FILE")
    return None


def _of_variants(model: ModelInfo, others: Sequence[Announcement]) -> Absence | None:
    """The cause if others serve a model of the same shape. Those of our name come first."""
    variants = {
        (each.offer.model != model.name, each.offer.model, each.offer.profile.model_digest)
        for each in others
        if is_variant(model.digest, each.offer.profile.model_digest)
    }
    if not variants:
        return None
    _, name, digest = min(variants)
    text, fix = explain_difference(model.digest, digest, name)
    return Absence(f"the peers serve {name} {text}", fix)


def _of_others(model: ModelInfo, announcements: Sequence[Announcement]) -> Absence | None:
    others = {each.offer.model for each in announcements if each.offer.profile.model_digest != model.digest}
    if models := sorted(others)[:NAMED]:
        text = f"the swarm serves {', '.join(models)}, of other weights"
        return Absence(text, "give the MODEL that it serves, or start servers for this one")
    return None


def _of_wrong_clocks(clocks: ClockVerdict | None) -> Absence | None:
    if clocks is None or not clocks.wrong:
        return None
    named, off = _named(clocks.wrong), f"off by {clocks.offset_s:+.1f} s"
    if _are_one(clocks.wrong):
        text = f"the clock of {named} is {off}, so what it announces is not believed"
        return Absence(text, f"tell who runs it: {CLOCK_FIX}")
    text = f"the clocks of {named} are {off}, so what they announce is not believed"
    return Absence(text, f"tell who runs them: {CLOCK_FIX}")


def _agreed(peers: Iterable[PeerId], one: str, several: str) -> str:
    """The peers, and the predicate that agrees with their number."""
    distinct = list(dict.fromkeys(peers))
    return f"{_named(distinct)} {one if _are_one(distinct) else several}"


def _named(peers: Iterable[PeerId]) -> str:
    distinct = list(dict.fromkeys(peers))
    return f"{'peer' if _are_one(distinct) else 'peers'} {', '.join(distinct[:NAMED])}"


def _are_one(peers: Iterable[PeerId]) -> bool:
    return len(set(peers)) == 1


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
