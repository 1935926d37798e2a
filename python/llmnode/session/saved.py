"""A session in a file: all that another process needs to go on with it where it stood.

    magic 16 | header's size 4 | header in msgpack | payloads of the log, one after another

The file is for its owner's eyes alone: the key in it is what servers know the session's client by. The reader
checks types and sizes, and nothing else.
"""

from __future__ import annotations

import os
import secrets
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from llmnode import _native
from llmnode.core.ids import SESSION_ID_BYTES, Epoch, PeerId, SessionId
from llmnode.core.model import PRECISIONS, Profile
from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.wire.payload import Codec, payload_bytes
from llmnode.wire.receipt import NONCE_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llmnode.wire.frame import Buffer

MAGIC = b"llmnode-session\n"
VERSION = 1
MOST_BYTES = 4 << 30
"""The largest file. It holds 65,536 positions of 16,384 values in fp32."""
MOST_HEADER_BYTES = 8 << 20
"""To read a hostile header takes some sixty times that in memory."""
MOST_CONTACTS = 16
KEY_BYTES = 32

_MOST_POSITIONS = 1 << 20
_MOST_EPOCHS = 1 << 31
_MOST_BLOCKS = 1024
_LONGEST_ADDRESS = 300
_LONGEST_NAME = 200
_LONGEST_PEER = 100
_DIGEST_BYTES = 32
_U32 = 2**32 - 1
_SIZE = struct.Struct("<I")
_PREFIX_BYTES = len(MAGIC) + _SIZE.size


@dataclass(frozen=True, slots=True)
class SavedHop:
    """The peer that has the KV of a span. It keeps the KV for a while under the name `session`, unless that is None.

    `nonce` is the peer's own for that session, and its receipts have it. It is empty in protocol 1.
    """

    peer: PeerId
    span: Span
    session: SessionId | None
    nonce: bytes = b""


@dataclass(frozen=True, slots=True)
class SavedSession:
    """Where a session stands. `log` is what its first hop was given, in payloads and their lengths.

    `hops` cover the model, in the order of their blocks; those that keep their KV stand in `epoch`, at `position` or
    beyond. `token_ids` are the caller's. `contacts` are addresses of peers, those of the hops first.
    """

    model: str
    profile: Profile
    blocks: int
    hidden_size: int
    codec: Codec
    max_length: int
    position: int
    epoch: Epoch
    log: tuple[tuple[Buffer, int], ...]
    hops: tuple[SavedHop, ...]
    token_ids: tuple[int, ...] = ()
    contacts: tuple[str, ...] = ()
    key: bytes = bytes(KEY_BYTES)


def pack(saved: SavedSession) -> bytes:
    payloads = b"".join(payload for payload, _ in saved.log)
    header = msgpack.packb(
        {
            "version": VERSION,
            "model": saved.model,
            "model_digest": saved.profile.model_digest,
            "blocks": saved.blocks,
            "hidden_size": saved.hidden_size,
            "dtype": saved.profile.precision.name,
            "codec": str(saved.codec),
            "max_length": saved.max_length,
            "position": saved.position,
            "epoch": saved.epoch,
            "log": [length for _, length in saved.log],
            "log_digest": _native.blake3_digest(payloads),
            "hops": [_hop(each) for each in saved.hops],
            "token_ids": list(saved.token_ids),
            "contacts": list(saved.contacts),
            "key": saved.key,
            **({"adapter": saved.profile.adapter} if saved.profile.adapter else {}),
        }
    )
    return b"".join((MAGIC, _SIZE.pack(len(header)), header, payloads))


def _hop(saved: SavedHop) -> list[object]:
    nonce = [saved.nonce] if saved.nonce else []
    return [saved.peer, saved.span.start, saved.span.end, saved.session, *nonce]


def parse(content: bytes) -> SavedSession:
    """Read the content of a file that may come from anywhere. Raises ConfigError, which names the field."""
    header, payloads = _parts(content)
    fields = _Fields(header)
    if fields.number("version", 0) != VERSION:
        raise ConfigError(f"version: not {VERSION}, the only one that this llmnode reads")
    blocks, hidden_size = fields.number("blocks", 1, _MOST_BLOCKS), fields.number("hidden_size", 1, 1 << 20)
    codec = Codec(fields.choice("codec", list(Codec)))
    max_length = fields.number("max_length", 1, _MOST_POSITIONS)
    position = fields.number("position", 0, max_length)
    if fields.binary("log_digest", _DIGEST_BYTES) != _native.blake3_digest(payloads):
        raise ConfigError("log_digest: not that of the log, so the file is damaged")
    lengths = [_number(each, "log", 1, position) for each in fields.array("log", position)]
    saved = SavedSession(
        fields.text("model", _LONGEST_NAME),
        _read_profile(fields),
        blocks,
        hidden_size,
        codec,
        max_length,
        position,
        Epoch(fields.number("epoch", 0, _MOST_EPOCHS)),
        _read_log(payloads, lengths, codec, hidden_size, position),
        _read_hops(fields.array("hops", blocks), blocks),
        tuple(_number(each, "token_ids", 0, _U32) for each in fields.array("token_ids", _MOST_POSITIONS)),
        tuple(_text(each, "contacts", _LONGEST_ADDRESS) for each in fields.array("contacts", MOST_CONTACTS)),
        fields.binary("key", KEY_BYTES),
    )
    fields.end()
    return saved


def write(path: Path, content: bytes) -> None:
    """Put `content` in the file at `path`, whole or not at all, readable by its owner alone. Raises ConfigError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write the session to {path} ({error.strerror}): name another file") from error


def read(path: Path) -> SavedSession:
    """Raises ConfigError if the file cannot be read, is no session, or is open to others."""
    content = read_file(
        path, f"the session {path}", MOST_BYTES, is_secret=lambda content: content.startswith(MAGIC), magic=MAGIC
    )
    try:
        return parse(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parts(content: bytes) -> tuple[Any, memoryview]:  # Any: what a file holds is not known yet
    """The header's value, and the payloads."""
    if len(content) > MOST_BYTES:
        raise ConfigError(f"a session has at most {MOST_BYTES} bytes")
    if content[: len(MAGIC)] != MAGIC or len(content) < _PREFIX_BYTES:
        raise ConfigError("this is no saved session: name a file that `export` has written")
    (size,) = _SIZE.unpack_from(content, len(MAGIC))
    if size > min(MOST_HEADER_BYTES, len(content) - _PREFIX_BYTES):
        raise ConfigError(f"a header of {size} bytes, of at most {MOST_HEADER_BYTES}, and not all of it is there")
    rest = memoryview(content)[_PREFIX_BYTES:]
    try:
        header = msgpack.unpackb(
            rest[:size], raw=False, strict_map_key=True, object_pairs_hook=_without_repeats, max_map_len=64,
            max_ext_len=0,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException) as error:  # msgpack documents both
        raise ConfigError(f"the header is not msgpack ({str(error) or type(error).__name__})") from error
    return header, rest[size:]


def _without_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field comes twice")
    return values


def _read_profile(fields: _Fields) -> Profile:
    precision = PRECISIONS[fields.choice("dtype", PRECISIONS)]
    adapter = fields.binary("adapter", _DIGEST_BYTES) if "adapter" in fields else None
    return Profile(fields.binary("model_digest", _DIGEST_BYTES), precision, adapter)


def _read_log(
    payloads: memoryview, lengths: Sequence[int], codec: Codec, hidden_size: int, position: int
) -> tuple[tuple[Buffer, int], ...]:
    """Payloads that a link carries, of all positions."""
    sizes = [payload_bytes(codec, length * hidden_size) for length in lengths]
    if sum(lengths) != position or sum(sizes) != len(payloads):
        raise ConfigError(f"log: not of the {position} positions that the session has")
    if max(sizes, default=0) > LinkPolicy().max_payload_bytes:
        raise ConfigError(f"log: a payload of {max(sizes)} bytes, which no link carries")
    log, at = [], 0
    for length, size in zip(lengths, sizes, strict=True):
        log.append((payloads[at : at + size], length))
        at += size
    return tuple(log)


def _read_hops(values: Sequence[Any], blocks: int) -> tuple[SavedHop, ...]:
    hops: list[SavedHop] = []
    names: set[SessionId] = set()
    at = 0
    for value in values:
        if type(value) is not list or len(value) not in (4, 5):
            raise ConfigError("hops: not of a peer, two blocks, a session and perhaps a nonce each")
        peer, start, end, session, *rest = value
        nonce = rest[0] if rest else b""
        if rest and (session is None or type(nonce) is not bytes or len(nonce) != NONCE_BYTES):
            raise ConfigError("hops: a nonce of another length, or of no session")
        span = Span(_number(start, "hops", at, at), _number(end, "hops", at + 1, blocks))
        if session is not None:
            if type(session) is not bytes or len(session) != SESSION_ID_BYTES or session in names:
                raise ConfigError("hops: a session without a name of its own")
            names.add(SessionId(session))
        hops.append(SavedHop(PeerId(_text(peer, "hops", _LONGEST_PEER)), span, session, nonce))
        at = span.end
    if at != blocks:
        raise ConfigError(f"hops: blocks [{at}, {blocks}) are in none")
    return tuple(hops)


class _Fields:
    """The file's map. Each field is taken once; whatever is not as it must be raises ConfigError."""

    def __init__(self, values: Any) -> None:
        if type(values) is not dict:
            raise ConfigError("not a map of fields, so this is no session")
        self._rest: dict[Any, Any] = values

    def __contains__(self, name: str) -> bool:
        return name in self._rest

    def take(self, name: str) -> Any:
        if name not in self._rest:
            raise ConfigError(f"{name}: missing")
        return self._rest.pop(name)

    def number(self, name: str, low: int, high: int = _U32) -> int:
        return _number(self.take(name), name, low, high)

    def text(self, name: str, longest: int) -> str:
        return _text(self.take(name), name, longest)

    def choice(self, name: str, choices: Collection[str]) -> str:
        if (value := self.text(name, _LONGEST_NAME)) not in choices:
            raise ConfigError(f"{name}: none of {', '.join(choices)}")
        return value

    def binary(self, name: str, size: int) -> bytes:
        value = self.take(name)
        if type(value) is not bytes or len(value) != size:
            raise ConfigError(f"{name}: not {size} bytes")
        return value

    def array(self, name: str, most: int) -> list[Any]:
        value = self.take(name)
        if type(value) is not list or len(value) > most:
            raise ConfigError(f"{name}: not a list of at most {most}")
        return value

    def end(self) -> None:
        """Nothing is left that was not taken."""
        for name in self._rest:
            raise ConfigError(f"{str(name)[:_LONGEST_NAME]!r}: there is no such field")


def _number(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name}: not a whole number from {low} to {high}")
    return value


def _text(value: Any, name: str, longest: int) -> str:
    if type(value) is not str or not 1 <= len(value) <= longest:
        raise ConfigError(f"{name}: not a text of 1 to {longest} characters")
    return value
