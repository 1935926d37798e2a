"""Protocol 1, the one before versions were negotiated, for peers that speak nothing newer.

Such a peer refuses a message with a field that it does not know, and for one such announcement a whole exchange. So it
gets messages without extensions, and of every announcement a form of its own, with a signature of its own. That form
is one sequence number older: nodes that know both forms take the other one for the newer. This module and its callers
can go when no such peer is left.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import msgpack

from llmnode.core.announcement import SignedBody
from llmnode.errors import PeerRefused
from llmnode.wire.fields import read_map
from llmnode.wire.frame import LINK_VERSIONS, FrameType
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Set

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.wire.frame import Frame
    from llmnode.wire.messages import AnnouncementBody

VERSION = LINK_VERSIONS[-1]
ANNOUNCED = (
    "peer", "addresses", "sequence", "expires_ms", "software", "model", "model_digest", "blocks", "dtype",
    "span_start", "span_end", "state", "block_us", "kv_tokens", "kv_tokens_free",
)  # fmt: skip
"""The fields of an announcement."""
STATES = ("joining", "online", "draining", "left")
GROWN = frozenset((FrameType.DESCRIPTION, FrameType.OPEN, FrameType.NEIGHBOURS))
"""The frames whose metadata may have fields that came later."""
NEW = frozenset(
    (
        FrameType.EVALUATE,
        FrameType.BACKWARD,
        FrameType.ADAPTER,
        FrameType.PART,
        FrameType.WANT,
        FrameType.PROBE,
        FrameType.DIGESTS,
        FrameType.MISSING,
    )
)
"""Questions that such a peer does not know."""
LATER = frozenset(("adapter", "extensions", "required"))


def announcement_body(body: AnnouncementBody) -> bytes | None:
    """The form of an announcement, to be signed. None if such a peer would take it for something else."""
    if body.state not in STATES or body.adapter is not None:
        return None
    earlier = {"sequence": body.sequence - 1, "expires_ms": body.expires_ms - 1}  # its lifetime is the longest allowed
    values = {name: getattr(body, name) for name in ANNOUNCED} | earlier
    packed = msgpack.packb(values)
    assert isinstance(packed, bytes)
    return packed


def announces_more(body: AnnouncementBody, ignored: Set[str] = frozenset()) -> bool:
    """Whether there is a field that such a peer does not know. `ignored` are those that we do not know either."""
    known = {field.name for field in fields(body) if getattr(body, field.name) is not None}
    return bool(ignored) or not known <= set(ANNOUNCED)


def form_of(body: AnnouncementBody, ignored: Set[str], signed: SignedBody) -> SignedBody | None:
    """The form of an announcement that was `signed`; `signed` itself if that has no field more, None if it has none.

    Its signature is not checked here.
    """
    if not announces_more(body, ignored):
        return signed if body.state in STATES else None
    packed = announcement_body(body)
    if packed is None or body.signature_1 is None:
        return None
    return SignedBody(packed, body.signature_1)


def sequence_of(announcement: SignedAnnouncement, form: SignedBody) -> int:
    """The sequence number of its form for such a peer."""
    return announcement.announcement.sequence - (form != announcement.signed)


def has_more(frame: Frame) -> bool:
    """Whether such a peer may be unable to read the frame as it is."""
    is_grown = frame.type in GROWN and not LATER.isdisjoint(read_map(frame.type.name, frame.meta))
    return is_grown or frame.type in NEW


def without_more(frame: Frame) -> Frame:
    """The frame for such a peer. Raises PeerRefused if that would be another request, or another answer."""
    if frame.type in NEW:
        why = f"one side speaks protocol {VERSION} and needs an update: it does not know {frame.type.name}"
        raise PeerRefused(RefusalCode.UNKNOWN_FRAME, why)
    if frame.type not in GROWN:
        return frame
    values = read_map(frame.type.name, frame.meta)
    needs = [f"the extension {name!r}" for name in values.get("required", [])] + ["an adapter"] * ("adapter" in values)
    if needs:
        why = f"one side speaks protocol {VERSION} and needs an update: it does not know {', '.join(needs)}"
        raise PeerRefused(RefusalCode.UNKNOWN_EXTENSION, why)
    meta = msgpack.packb({name: value for name, value in values.items() if name not in LATER})
    return replace(frame, meta=meta)
