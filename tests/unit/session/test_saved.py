"""Files of sessions: they are read back whole, their permissions are tight, and any other file is refused by name."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode import _native
from llmnode.core.ids import Epoch, PeerId, SessionId
from llmnode.core.model import PRECISIONS, Precision, Profile
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.net.identity import fresh_identity, identity_of
from llmnode.session.saved import MAGIC, SavedHop, SavedSession, pack, parse, read, write
from llmnode.wire.payload import Codec, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIDDEN_SIZE = 3
AT = len(MAGIC) + 4


def payload(length: int, codec: Codec = Codec.RAW) -> tuple[bytes, int]:
    return random.Random(length).randbytes(payload_bytes(codec, length * HIDDEN_SIZE)), length


SAVED = SavedSession(
    model="model",
    profile=Profile(b"d" * 32, Precision()),
    blocks=6,
    hidden_size=HIDDEN_SIZE,
    codec=Codec.RAW,
    max_length=40,
    position=6,
    epoch=Epoch(7),
    log=(payload(4), payload(1), payload(1)),
    hops=(
        SavedHop(PeerId("12D3KooWone"), Span(0, 2), SessionId(b"1" * 16)),
        SavedHop(PeerId("12D3KooWtwo"), Span(2, 4), None),
        SavedHop(PeerId("12D3KooWsix"), Span(4, 6), SessionId(b"2" * 16), b"n" * 16),
    ),
    token_ids=(5, 0, 2**32 - 1),
    contacts=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWone",),
    key=b"k" * 32,
)
FILE = pack(SAVED)


def header_of(content: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<I", content, len(MAGIC))
    header: dict[str, Any] = msgpack.unpackb(content[AT : AT + size])
    return header


def with_header(header: Any, content: bytes = FILE) -> bytes:
    """The payloads of `content` under another header."""
    (size,) = struct.unpack_from("<I", content, len(MAGIC))
    packed = msgpack.packb(header)
    return MAGIC + struct.pack("<I", len(packed)) + packed + content[AT + size :]


def changed(**fields: Any) -> bytes:
    return with_header(header_of(FILE) | fields)


@pytest.mark.parametrize("codec", list(Codec))
def test_what_was_saved_is_read_back(codec: Codec) -> None:
    saved = replace(SAVED, codec=codec, log=(payload(4, codec), payload(2, codec)))
    read_back = parse(pack(saved))
    assert replace(read_back, log=()) == replace(saved, log=())
    assert [(bytes(each), length) for each, length in read_back.log] == list(saved.log)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_session_of_any_precision_is_read_back(dtype: str) -> None:
    saved = replace(SAVED, profile=Profile(b"d" * 32, PRECISIONS[dtype]))
    assert parse(pack(saved)).profile == saved.profile


def test_a_session_of_no_positions_is_read_back() -> None:
    saved = replace(SAVED, position=0, log=())
    assert parse(pack(saved)) == saved


REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "this is no saved session"),
    "something else": (b"\x89PNG" * 20, "this is no saved session"),
    "cut off": (FILE[:-1], "log_digest"),
    "cut off in the header": (FILE[: AT + 20], "not all of it is there"),
    "a header of more than there may be": (MAGIC + b"\xff" * 4 + bytes(100), "not all of it is there"),
    "no msgpack": (MAGIC + struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not msgpack"),
    "no map": (with_header([1, 2]), "not a map"),
    "a field twice": (MAGIC + struct.pack("<I", 5) + b"\x82\xa1a\xa1a", "not msgpack"),
    "another version": (changed(version=2), "version"),
    "version true": (changed(version=True), "version"),
    "an unknown field": (changed(more=1), "'more'"),
    "a damaged payload": (FILE[:-1] + b"\x00", "log_digest"),
    "no name": (changed(model=""), "model"),
    "a digest of 31 bytes": (changed(model_digest=b"d" * 31), "model_digest"),
    "no blocks": (changed(blocks=0), "blocks"),
    "a huge model": (changed(hidden_size=2**31), "hidden_size"),
    "another dtype": (changed(dtype="int4"), "dtype"),
    "another codec": (changed(codec="zip"), "codec"),
    "a length of nothing": (changed(max_length=0), "max_length"),
    "a length without bounds": (changed(max_length=2**63), "max_length"),
    "beyond its length": (changed(position=41), "position"),
    "an epoch that cannot be raised": (changed(epoch=2**32 - 1), "epoch"),
    "a log that is too short": (changed(log=[4, 1]), "log"),
    "a log that is too long": (changed(log=[4, 1, 1, 1]), "log"),
    "a piece of nothing": (changed(log=[6, 0]), "log"),
    "a negative piece": (changed(log=[7, -1]), "log"),
    "a hop that overlaps": (changed(hops=[["a", 0, 3, None], ["b", 2, 6, None]]), "hops"),
    "a hole": (changed(hops=[["a", 0, 2, None], ["b", 3, 6, None]]), "hops"),
    "an end that is missing": (changed(hops=[["a", 0, 5, None]]), "hops"),
    "no hops": (changed(hops=[]), "hops"),
    "a hop that is none": (changed(hops=[7]), "hops"),
    "a nameless peer": (changed(hops=[["", 0, 6, None]]), "hops"),
    "a session's name of the wrong size": (changed(hops=[["a", 0, 6, b"1"]]), "hops"),
    "a nonce of the wrong size": (changed(hops=[["a", 0, 6, b"1" * 16, b"n"]]), "nonce"),
    "a nonce that is empty": (changed(hops=[["a", 0, 6, b"1" * 16, b""]]), "nonce"),
    "a nonce of no session": (changed(hops=[["a", 0, 6, None, b"n" * 16]]), "nonce"),
    "more than a nonce": (changed(hops=[["a", 0, 6, b"1" * 16, b"n" * 16, 1]]), "hops"),
    "two hops of one name": (changed(hops=[["a", 0, 2, b"1" * 16], ["b", 2, 6, b"1" * 16]]), "hops"),
    "a token below nothing": (changed(token_ids=[-1]), "token_ids"),
    "tokens that are none": (changed(token_ids="abc"), "token_ids"),
    "too many contacts": (changed(contacts=["/ip4"] * 17), "contacts"),
    "an address without end": (changed(contacts=["x" * 301]), "contacts"),
    "a key of the wrong size": (changed(key=b"k" * 31), "key"),
}


@pytest.mark.parametrize(("content", "where"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_session_is_refused_by_name(content: bytes, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        parse(content)


def test_a_field_that_is_missing_is_named() -> None:
    for name in header_of(FILE):
        rest = header_of(FILE)
        del rest[name]
        with pytest.raises(ConfigError, match=name):
            parse(with_header(rest))


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255), st.binary(max_size=8))
def test_a_damaged_file_is_another_session_or_a_typed_error(at: int, change: int, more: bytes) -> None:
    for content in (FILE[:at] + bytes([FILE[at] ^ change]) + FILE[at + 1 :], FILE[:at] + more, FILE + more):
        try:
            saved = parse(content)
        except ConfigError:
            continue
        assert sum(length for _, length in saved.log) == saved.position


def test_a_payload_that_no_link_carries_is_refused() -> None:
    hidden_size = 1 << 20
    content = bytes(4 * hidden_size * 17)
    header = header_of(FILE) | {
        "hidden_size": hidden_size,
        "position": 17,
        "log": [17],
        "log_digest": _native.blake3_digest(content),
    }
    with pytest.raises(ConfigError, match="no link carries"):
        parse(with_header(header, MAGIC + bytes(4) + content))


# On disk


def test_a_file_is_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "session"
    path.write_text("what was there before")
    path.chmod(0o644)
    write(path, FILE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert replace(read(path), log=SAVED.log) == SAVED
    assert os.listdir(tmp_path) == ["session"], "nothing is left beside it"


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    write(path, FILE)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"llmnode", b"Dear diary, today I have seen a session"])
def test_a_file_that_is_no_session_is_called_so_whoever_may_read_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "diary"
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="diary: this is no saved session"):
        read(path)


@pytest.mark.parametrize("act", [lambda path: write(path, FILE), read], ids=["write", "read"])
def test_a_place_where_there_is_no_file_is_named(act: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/session"):
        act(tmp_path / "nowhere" / "session")


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "session"
    path.mkdir()
    with pytest.raises(ConfigError):
        write(path, FILE)
    assert os.listdir(tmp_path) == ["session"]


def test_the_same_key_is_the_same_peer() -> None:
    pair = fresh_identity()
    assert identity_of(pair.private_key.to_bytes()).public_key.to_bytes() == pair.public_key.to_bytes()
