"""Announcements of a node that is newer than this one: they have a field that is not known here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

from llmnode.wire import version_1
from llmnode.wire.announcement import SIGNING_CONTEXT, sign_announcement, unpack_announcement
from llmnode.wire.messages import AnnouncementBody, unpack_signed

if TYPE_CHECKING:
    from llmnode.core.announcement import Announcement, SignedAnnouncement
    from llmnode.wire.receipt import Sign

LOAD = {"sessions": 3, "of": [1, 2]}


def sign_grown(announcement: Announcement, sign: Sign) -> SignedAnnouncement:
    """With its `load`, and signed for peers of protocol 1 too."""
    body = sign_announcement(announcement, sign).signed.body
    old = version_1.announcement_body(unpack_signed(AnnouncementBody, body)[0])
    assert old is not None
    more = {"load": LOAD, "signature_1": sign(SIGNING_CONTEXT + old)}
    grown = msgpack.packb(msgpack.unpackb(body) | more)
    assert isinstance(grown, bytes)
    return unpack_announcement(grown, sign(SIGNING_CONTEXT + grown))
