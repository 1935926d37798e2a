"""Mutations of frames and of their bytes, as a hostile client may send them.

Mutations come in three depths. Sequences have frames repeated, swapped or left out. Single frames are mutated before
they are encoded, so that the checksum is right and the parsers behind it are reached: fields out of range, metadata and
payload that lie. Bytes have bits flipped, lengths that lie, or noise: then the framing is lost, and the server must end
the link.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import msgpack

from llmnode import _native
from llmnode.core.ids import SessionId
from llmnode.core.links.write_size import LEAST_BYTES
from llmnode.core.policy import LinkPolicy
from llmnode.errors import RemoteProtocolError
from llmnode.wire.frame import HEADER_BYTES, Frame, FrameDecoder, FrameType, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

POLICY = LinkPolicy()
PASSES = (FrameType.EVALUATE, FrameType.BACKWARD)
EDGES = (0, 1, 2, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
_CHECKSUM_AT = HEADER_BYTES - 4
_META_BYTES_AT = HEADER_BYTES - 12
_PAYLOAD_BYTES_AT = HEADER_BYTES - 8


# Mutations of a sequence


def shuffled_a_little(chance: Random, frames: list[Frame]) -> list[Frame]:
    frames = list(frames)
    for _ in range(chance.randrange(3)):
        at, other = chance.randrange(len(frames)), chance.randrange(len(frames))
        match chance.randrange(4):
            case 0:
                frames[at], frames[other] = frames[other], frames[at]
            case 1:
                frames.insert(other, frames[at])
            case 2:
                frames[at:at] = [frames[at]] * chance.choice(
                    (2, 2, 3, 3, 5, 5, 8, 8, 24)
                )  # some overrun a session's queue
            case 3:
                del frames[at]
    return frames


# Mutations of a frame


def in_pieces(chance: Random, encoded: bytes) -> bytes:
    """Sends an encoded frame as PIECE frames, like a large one. All but the last have a least size."""
    at = chance.randint(min(LEAST_BYTES, len(encoded)), len(encoded))
    parts = [part for part in (encoded[:at], encoded[at:]) if part]
    return b"".join(encode(Frame(FrameType.PIECE, payload=part), POLICY) for part in parts)


# Mutations of a frame, before it is encoded


def mutated(chance: Random, frame: Frame) -> Frame:
    """A frame that still gets a right checksum: the parsers and the session behind it must find the fault."""
    kinds = [
        _of_another_type,
        _field_flipped,
        _field_at_an_edge,
        _field_off_by_one,
        _payload_changed,
        _meta_changed,
    ]
    if frame.type in (FrameType.OPEN, *PASSES):
        kinds += [_request_changed] * 6
    return chance.choice(kinds)(chance, frame)


def _of_another_type(chance: Random, frame: Frame) -> Frame:
    """A piece of a frame would be none, and end the link: see `in_pieces`. One type is not known yet."""
    kinds = [*FrameType, FrameType(max(FrameType) + 1)]
    return replace(frame, type=chance.choice([kind for kind in kinds if kind not in (frame.type, FrameType.PIECE)]))


def _field_flipped(chance: Random, frame: Frame) -> Frame:
    if chance.random() < 0.2:
        return replace(frame, session=SessionId(bit_flipped(chance, frame.session)))
    name = _some_field(chance)
    return replace(frame, **{name: getattr(frame, name) ^ 1 << chance.randrange(32)})


def _field_at_an_edge(chance: Random, frame: Frame) -> Frame:
    return replace(frame, **{_some_field(chance): chance.choice(EDGES)})


def _field_off_by_one(chance: Random, frame: Frame) -> Frame:
    name = _some_field(chance)
    return replace(frame, **{name: (getattr(frame, name) + chance.choice((-1, 1))) % 2**32})


def _some_field(chance: Random) -> str:
    return chance.choice(("epoch", "step", "start", "length"))


def _payload_changed(chance: Random, frame: Frame) -> Frame:
    return replace(frame, payload=_bytes_changed(chance, bytes(frame.payload)))


def _meta_changed(chance: Random, frame: Frame) -> Frame:
    return replace(frame, meta=_bytes_changed(chance, bytes(frame.meta)))


def _request_changed(chance: Random, frame: Frame) -> Frame:
    """Metadata that is msgpack, of fields that are not right."""
    fields = msgpack.unpackb(frame.meta)
    name = chance.choice(sorted(fields))
    odd: list[object] = [None, True, -1, 0, 2**32, 2**63, 1.5, "", "x" * 3000, b"", bytes(32), [], {}, [[[]]], *EDGES]
    match chance.randrange(6):
        case 0:
            del fields[name]
        case 1:
            fields.update(chance.choice(({"codec": "zip"}, {"adapter": chance.randbytes(32)}, {"required": ["x"]})))
        case 2:
            fields[chance.choice(("x", "", "codec ", 7, None))] = 1
        case 3 if isinstance(fields[name], int):
            fields[name] = max(0, fields[name] + chance.choice((-1, 1)))
        case 4 if isinstance(fields[name], bytes):
            fields[name] = bit_flipped(chance, fields[name])
        case _:
            fields[name] = chance.choice(odd)
    return replace(frame, meta=msgpack.packb(fields))


def _bytes_changed(chance: Random, content: bytes) -> bytes:
    kind = chance.randrange(5) if content else 4
    at = chance.randrange(len(content) + 1)
    match kind:
        case 0:
            return bit_flipped(chance, content)
        case 1:
            return content[:at]
        case 2:
            return content[:at] + chance.randbytes(chance.randrange(1, 64)) + content[at:]
        case 3:
            return chance.randbytes(len(content))
        case _:
            return content + chance.choice((b"\x00", b"\x91" * 500, b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x80", content))


# Mutations of the bytes


def broken(chance: Random, encoded: bytes) -> bytes:
    """Bytes at which most decoders give up: see `is_refused`."""
    makers: list[Callable[[Random, bytes], bytes]] = [bit_flipped, _oversized, _header_spoiled, _noise, _lengths_lie]
    return chance.choice(makers)(chance, encoded)


def boundary_moved(chance: Random, encoded: bytes) -> bytes:
    """Metadata is taken for payload, or payload for metadata; the frame is as long as before, its checksum right."""
    meta_bytes, payload_bytes = struct.unpack_from("<II", encoded, _META_BYTES_AT)
    moved = chance.randrange(min(meta_bytes + payload_bytes, POLICY.max_meta_bytes) + 1)
    return _with_checksum(_patched(encoded, _META_BYTES_AT, "<II", moved, meta_bytes + payload_bytes - moved))


def bit_flipped(chance: Random, content: bytes) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _oversized(chance: Random, encoded: bytes) -> bytes:
    at, limit = chance.choice(((_META_BYTES_AT, POLICY.max_meta_bytes), (_PAYLOAD_BYTES_AT, POLICY.max_payload_bytes)))
    return _with_checksum(_patched(encoded, at, "<I", chance.choice((limit + 1, 2**31, 2**32 - 1))))


def _lengths_lie(chance: Random, encoded: bytes) -> bytes:
    """A payload some bytes shorter or longer than it is, its checksum right; then comes what is left over, or noise."""
    (payload_bytes,) = struct.unpack_from("<I", encoded, _PAYLOAD_BYTES_AT)
    lied = max(0, payload_bytes + chance.choice((-7, -1, 1, 30)))
    frame_bytes = len(encoded) - payload_bytes + lied
    lying = _patched(encoded, _PAYLOAD_BYTES_AT, "<I", lied) + chance.randbytes(2 * HEADER_BYTES)
    return _with_checksum(lying[:frame_bytes]) + lying[frame_bytes:]


def _header_spoiled(chance: Random, encoded: bytes) -> bytes:
    """Magic, version or type that are not ours, under a right checksum."""
    at = chance.randrange(4)
    return _with_checksum(_patched(encoded, at, "<B", chance.choice((11, 99, 255))))


def _noise(chance: Random, _encoded: bytes) -> bytes:
    return chance.randbytes(chance.randrange(HEADER_BYTES, 2000))


def _patched(encoded: bytes, at: int, form: str, *values: int) -> bytes:
    patched = bytearray(encoded)
    struct.pack_into(form, patched, at, *values)
    return bytes(patched)


def _with_checksum(encoded: bytes) -> bytes:
    checksum = _native.frame_crc32c([encoded[:_CHECKSUM_AT], encoded[HEADER_BYTES:]])
    return _patched(encoded, _CHECKSUM_AT, "<I", checksum)


def is_refused(data: bytes) -> bool:
    try:
        for _ in FrameDecoder(POLICY).feed(data):
            pass
    except RemoteProtocolError:
        return True
    return False
