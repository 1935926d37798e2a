"""Messages of a node that is newer than this one: they have a field that is not known here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgpack

from llmnode.node.serve.server import Server
from llmnode.swarm import membership
from llmnode.swarm.peer_connection import PeerConnection
from llmnode.wire import version_1
from llmnode.wire.announcement import SIGNING_CONTEXT, sign_announcement, unpack_announcement
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import AnnouncementBody, unpack_signed

if TYPE_CHECKING:
    from llmnode.core.announcement import Announcement, SignedAnnouncement
    from llmnode.wire.frame import Frame
    from llmnode.wire.receipt import Sign

ALTITUDE = {"sessions": 3, "of": [1, 2]}


def sign_grown(announcement: Announcement, sign: Sign) -> SignedAnnouncement:
    """With its `altitude`, and signed for peers of protocol 1 too."""
    body = sign_announcement(announcement, sign).signed.body
    old = version_1.announcement_body(unpack_signed(AnnouncementBody, body)[0])
    assert old is not None
    more = {"altitude": ALTITUDE, "signature_1": sign(SIGNING_CONTEXT + old)}
    grown = msgpack.packb(msgpack.unpackb(body) | more)
    assert isinstance(grown, bytes)
    return unpack_announcement(grown, sign(SIGNING_CONTEXT + grown))


EXTENDED = {FrameType.OPEN, FrameType.NEIGHBOURS, FrameType.DESCRIPTION}
"""The frames that may have extensions."""


def extended(frame: Frame, *, required: bool = False) -> Frame:
    """With `altitude` as an extension of its metadata."""
    more = {"extensions": {"altitude": ALTITUDE}, "required": ["altitude"] if required else []}
    return replace(frame, meta=msgpack.packb(msgpack.unpackb(frame.meta) | more))


def grow() -> None:
    """From now on this whole process is a newer node: all that may have a field more has one."""
    tell, describe = PeerConnection.tell, Server.describe

    async def tell_more(self: PeerConnection, frame: Frame) -> None:
        await tell(self, extended(frame) if frame.type in EXTENDED else frame)

    membership.sign_announcement = sign_grown
    PeerConnection.tell = tell_more  # type: ignore[method-assign]
    Server.describe = lambda self, **how: replace(describe(self, **how), extensions={"altitude": ALTITUDE})  # type: ignore[method-assign]
