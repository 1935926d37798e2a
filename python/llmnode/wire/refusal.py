"""Refusals: the typed no to a frame, with the same session, epoch and step as an answer to it would have."""

from __future__ import annotations

from llmnode.core.ids import NO_SESSION
from llmnode.errors import PeerError, PeerRefused, RemoteProtocolError
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, RefusalCode, pack, unpack


def refusal_of(frame: Frame, code: str, message: str, retry_after_s: float | None = None) -> Frame:
    meta = pack(Refusal(code=str(code), message=message[:2000], retry_after_ms=int(1000 * (retry_after_s or 0))))
    return Frame(FrameType.REFUSAL, frame.session, frame.epoch, frame.step, meta=meta)


def farewell_of_full() -> Frame:
    """The last frame of a link whose place or memory others need. It answers nothing, and tells the client so."""
    return refusal_of(Frame(FrameType.REFUSAL), RefusalCode.BUSY, "others need the place of this link")


def is_farewell_of_full(frame: Frame) -> bool:
    """Whether it may be that, if no other frame follows. Questions without a session have other steps than 0."""
    if frame.type is not FrameType.REFUSAL or frame.session != NO_SESSION or frame.step:
        return False
    try:
        return unpack(Refusal, frame.meta).code == RefusalCode.BUSY
    except (RemoteProtocolError, PeerRefused):
        return False


def memory_in_s(error: PeerError | None) -> float | None:
    """The pause after which the peer may have memory, if it has refused for want of that alone. None if not so."""
    if isinstance(error, PeerRefused) and error.code == RefusalCode.BUSY:
        return error.retry_after_s
    return None


def refusal_for(frame: Frame, error: PeerRefused | RemoteProtocolError) -> Frame:
    """The refusal of a frame that could not be read, or not be granted."""
    if isinstance(error, PeerRefused):
        return refusal_of(frame, error.code, error.reason, error.retry_after_s)
    return refusal_of(frame, RefusalCode.BAD_MESSAGE, error.message)
