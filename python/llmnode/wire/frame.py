"""Frames: a fixed header, msgpack metadata and raw tensor bytes.

    magic 2 | version 1 | type 1 | session 16 | epoch 4 | step 4 | start 4 | length 4 | meta 4 | payload 4 | crc32c 4

The upper bit of the type says that the payload is packed (`_native.pack`), for this link alone: digests and signatures
are of the unpacked payload. All integers are little-endian and unsigned. `start` and `length` are positions. The
checksum covers the header (with the checksum left out), metadata and payload as they cross. It finds accidents; digests
and signatures are for adversaries.

`messages.py` knows the metadata. Nothing here does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.core.ids import NO_SESSION, SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.links.write_size import LEAST_BYTES
from llmnode.core.policy import LinkPolicy
from llmnode.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmnode.core.operations import Buffer as Buffer  # noqa: PLC0414  its readers find it here

MAGIC = b"LN"
VERSION = 1
"""The version of the header, in every frame."""
LINK_VERSIONS = (2, 1)
"""The versions of the protocol that peers agree on when a link opens, the newest first."""
_COVERED = struct.Struct(f"<2sBB{SESSION_ID_BYTES}sIIIIII")  # what the checksum covers of the header
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct(f"{_COVERED.format}I")
HEADER_BYTES = _HEADER.size
_PACKED = 0x80


class FrameType(IntEnum):
    """The purpose of a frame. Values are part of the protocol: never reuse one.

    A frame of a type that is not declared here is read like any other. A server refuses it (UNKNOWN_FRAME), so a peer
    that waits for an answer gets one, and the link goes on. A client drops it, or fails the one question that it
    answers.
    """

    HEARTBEAT = 0
    DESCRIBE = 1
    DESCRIPTION = 2
    OPEN = 3
    OPENED = 4
    STEP = 5
    RESULT = 6
    TRUNCATE = 7
    TRUNCATED = 8
    CLOSE = 9
    REFUSAL = 10
    VIEW = 11
    """Asks for announcements; the payload says which the asker has (`announcement.py`)."""
    NEWS = 12
    """Announcements: the answer to VIEW and MISSING, and what the asker then sends of its own."""
    NEIGHBOURS = 13
    FORWARDED = 14
    REPLAY = 15
    """Asks for logged results, to be pushed or sent; epoch and step are those of the hop that they are for."""
    REPLAYED = 16
    FORK = 17
    """Makes a session a copy of another one, up to a position."""
    FORKED = 18
    LEASE = 20
    """Asks that the session outlive its link."""
    LEASED = 21
    RESUME = 22
    """Moves a session of the same client from another link to this one."""
    RESUMED = 23
    PIECE = 24
    """The payload is the next piece of a second stream of frames, of the large ones: others pass between the pieces."""
    EVALUATE = 25
    """Whole sequences, to be put through blocks without a session."""
    EVALUATED = 26
    BACKWARD = 27
    """Whole sequences that went into blocks, and then gradients for what came out."""
    GRADIENT = 28
    ADAPTER = 29
    """Names an adapter, and asks which of its parts the server lacks."""
    LACKING = 30
    PART = 31
    """A part of an adapter, for one block."""
    HELD = 32
    WANT = 33
    """A server would push to the session. `step` is a number of its choice, the same for all that it pushes there."""
    GRANT = 34
    """How much it may push, with the number of its WANT. It comes again when that changes: it is no one answer."""
    PROBE = 35
    """Bytes by which a peer measures how fast it sends."""
    PROBED = 36
    DIGESTS = 37
    """Asks where two views differ (`view_digests.py`)."""
    DIFFERING = 38
    MISSING = 39
    """Asks for the announcements of some peers. NEWS answers it."""

    @classmethod
    def _missing_(cls, value: object) -> FrameType | None:
        """A type of a newer version. It has its number, and a name for messages."""
        if not isinstance(value, int) or not 0 <= value < _PACKED:
            return None
        unknown = int.__new__(cls, value)
        unknown._name_, unknown._value_ = f"TYPE_{value}", value
        return unknown

    @property
    def is_known(self) -> bool:
        return self in _KNOWN


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it crosses a link. `meta` is msgpack; `payload` is tensor bytes."""

    type: FrameType
    session: SessionId = NO_SESSION
    epoch: Epoch = Epoch(0)
    step: Step = Step(0)
    start: int = 0
    length: int = 0
    meta: Buffer = b""
    payload: Buffer = b""
    value_bytes: int = field(default=0, compare=False)
    """The size of the payload's floating-point numbers, 2 or 4; 0 for other payloads. Packing needs it. It does not
    cross the link."""
    packed: bool = False
    """The payload is packed. Only links see such frames."""

    @property
    def size_bytes(self) -> int:
        return HEADER_BYTES + len(self.meta) + len(self.payload)

    def for_session(self, session: SessionId) -> Frame:
        """The same frame, for another session."""
        at = session, self.epoch, self.step, self.start, self.length
        return Frame(self.type, *at, self.meta, self.payload, self.value_bytes, self.packed)


def encode(frame: Frame, policy: LinkPolicy) -> bytes:
    """The frame's bytes, in one buffer: a stream write takes one, and encryption copies it anyway."""
    return b"".join(encode_parts(frame, policy))


def encode_parts(frame: Frame, policy: LinkPolicy) -> tuple[Buffer, Buffer, Buffer]:
    """The frame's bytes, without a copy of its payload. Raises LocalProtocolError for a frame that no link may carry.

    The parts are the header, the metadata and the payload.
    """
    if len(frame.meta) > policy.max_meta_bytes or len(frame.payload) > policy.max_payload_bytes:
        raise LocalProtocolError(f"{frame.type.name} frame of {frame.size_bytes} bytes exceeds the link's limits")
    if len(frame.session) != SESSION_ID_BYTES:  # struct would cut or pad it
        raise LocalProtocolError(f"{frame.type.name} frame of session {frame.session!r}: not {SESSION_ID_BYTES} bytes")
    try:
        covered = _COVERED.pack(
            MAGIC,
            VERSION,
            frame.type | _PACKED if frame.packed else frame.type,
            frame.session,
            frame.epoch,
            frame.step,
            frame.start,
            frame.length,
            len(frame.meta),
            len(frame.payload),
        )
    except struct.error as error:
        raise LocalProtocolError(f"a field of the {frame.type.name} frame is out of range: {error}") from error
    checksum = _native.frame_crc32c([covered, frame.meta, frame.payload])
    return covered + _CHECKSUM.pack(checksum), frame.meta, frame.payload


class FrameDecoder:
    """Turns chunks of a byte stream into frames. Each payload byte is copied once, into the frame's own buffer.

    After an error the stream's framing is lost for good: drop the decoder and the connection with it.
    """

    def __init__(self, policy: LinkPolicy, *, of_pieces: bool = False) -> None:
        self._policy = policy
        self._pieces = None if of_pieces else FrameDecoder(policy, of_pieces=True)
        self._header = bytearray()
        self._body = bytearray()
        self._body_bytes = 0
        self._finished = 0  # frames
        self._least_piece_bytes = min(LEAST_BYTES, policy.piece_bytes)

    @property
    def held_bytes(self) -> int:
        """The bytes of frames that have not arrived whole."""
        own = len(self._header) + len(self._body)
        return own if self._pieces is None else own + self._pieces.held_bytes

    @property
    def partial(self) -> tuple[tuple[int | None, int], tuple[int | None, int]]:
        """The numbers and the received bytes of two incomplete frames. The second comes in pieces."""
        assert self._pieces is not None, "a decoder of pieces has none"
        return self._begun(), self._pieces._begun()

    def _begun(self) -> tuple[int | None, int]:
        return self._finished if self._header else None, len(self._body)

    def feed(self, chunk: Buffer) -> Iterator[Frame]:
        """Yield the frames that `chunk` completes. Raises RemoteProtocolError on the first byte that is wrong."""
        rest = memoryview(chunk)
        while rest:
            if wanted := HEADER_BYTES - len(self._header):
                self._header += rest[:wanted]
                rest = rest[wanted:]
                if len(self._header) < HEADER_BYTES:
                    return
                self._body_bytes = self._checked_body_bytes()
            # Grown by what arrives, not set to what is announced: a header alone must not cost us a whole payload.
            wanted = self._body_bytes - len(self._body)
            self._body += rest[:wanted]
            rest = rest[wanted:]
            if len(self._body) < self._body_bytes:
                return
            frame = self._finish()
            if frame.type is not FrameType.PIECE:
                yield frame
            elif self._pieces is not None:
                yield from self._pieces.feed(frame.payload)
                if len(frame.payload) < self._least_piece_bytes:
                    self._check_small_piece(len(frame.payload))
            else:
                raise RemoteProtocolError("a piece of a frame within a piece")

    def at_boundary(self) -> bool:
        """Whether the stream may end here without cutting a frame in two."""
        return not self._header and (self._pieces is None or self._pieces.at_boundary())

    def _check_small_piece(self, size_bytes: int) -> None:
        """A frame's last piece may be small. Others would cost us time, and bring hardly a byte."""
        assert self._pieces is not None
        if not size_bytes or not self._pieces.at_boundary():
            least = self._least_piece_bytes
            raise RemoteProtocolError(f"a piece of {size_bytes} bytes, at least {least} required amid a frame")

    def _checked_body_bytes(self) -> int:
        """Refuse a bad header before a byte of its body is waited or allocated for."""
        magic, version, kind, *_, meta_bytes, payload_bytes = _COVERED.unpack_from(self._header)
        if magic != MAGIC:
            raise RemoteProtocolError(f"a frame starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise RemoteProtocolError(f"speaks frame version {version}, we speak {VERSION}: one side needs an update")
        if kind == FrameType.PIECE | _PACKED:
            raise RemoteProtocolError("a piece of a frame is packed: only whole frames are")
        if meta_bytes > self._policy.max_meta_bytes:
            raise RemoteProtocolError(f"{meta_bytes} bytes of metadata, at most {self._policy.max_meta_bytes} allowed")
        most = self._policy.piece_bytes if kind == FrameType.PIECE else self._policy.max_payload_bytes
        if payload_bytes > most:
            raise RemoteProtocolError(f"{payload_bytes} payload bytes, at most {most} allowed")
        return int(meta_bytes + payload_bytes)

    def _finish(self) -> Frame:
        header, body = self._header, memoryview(self._body)
        self._header, self._body = bytearray(), bytearray()
        self._finished += 1
        _, _, kind, session, epoch, step, start, length, meta_bytes, _, expected = _HEADER.unpack_from(header)
        frame_type = _TYPES[kind & ~_PACKED]
        if _native.frame_crc32c([memoryview(header)[: _COVERED.size], body]) != expected:
            raise RemoteProtocolError(f"checksum of a {frame_type.name} frame does not match its bytes")
        return Frame(
            frame_type,
            SessionId(session),
            Epoch(epoch),
            Step(step),
            start,
            length,
            body[:meta_bytes],
            body[meta_bytes:],
            packed=bool(kind & _PACKED),
        )


_KNOWN = frozenset(FrameType)
_TYPES = tuple(map(FrameType, range(_PACKED)))
"""All types by their numbers, also those of newer versions. To call the enum takes longer."""
