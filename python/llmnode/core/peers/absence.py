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


@dataclass(frozen=True, slots=True)
class Absence:
    """`text` says what there is instead of what is missing; `fix` tells the user what to do."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}: {self.fix}" if self.text else self.fix


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
            text = f"{_named(tried)} announces some, and has failed"
            return Absence(text, "see that it runs and can be reached, or start another server") if tried else None
        text = f"{positions} positions are asked for, and the KV of those that hold some is for {largest} at most"
        return Absence(text, "ask for fewer, or start servers with more --kv-tokens")
    if online:
        text = f"{_named(each.peer for each in online)} would have some, but gave results that others contradict"
        return Absence(text, "start servers that you trust, or try again in some minutes")
    if joining := [each for each in holders if each.offer.state is PeerState.JOINING]:
        return Absence(
            f"{_named(each.peer for each in joining)} still loads them", "try again in a moment, when it is ready"
        )
    if newer := [each for each in holders if each.offer.state is PeerState.UNKNOWN]:
        text = f"{_named(each.peer for each in newer)} has some, in a state that this llmnode does not know"
        return Absence(text, "get a newer llmnode, or start servers for them")
    if holders:
        text = f"{_named(each.peer for each in holders)} has some, but is about to stop"
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
    text = f"{_named(without)} holds some, and does not announce the adapter {model.adapter.hex()}"
    return Absence(text, "give the folder of the adapter, or have such a server started with --adapters FOLDER")


def _of_doubles(ours: Sequence[Announcement]) -> Absence | None:
    if doubles := [each.peer for each in ours if each.has_double]:
        text = f"two nodes use the identity of {_named(doubles)}, and only one of them is found at a time"
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
    off = f"is off by {clocks.offset_s:+.1f} s"
    text = f"the clock of {_named(clocks.wrong)} {off}, so what it announces is not believed"
    return Absence(text, f"tell who runs it: {CLOCK_FIX}")


def _named(peers: Iterable[PeerId]) -> str:
    return f"peer {', '.join(list(dict.fromkeys(peers))[:NAMED])}"


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
