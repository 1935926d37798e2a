"""The key that the members of a private swarm share: in a file, or in an invite that names peers too.

It is mixed into every handshake (`secure.py`): a node without it connects to no member. The file has the form that IPFS
and other programs over libp2p use, so that their tools make and read it; but their way of encrypting with it is
another, so they are no members.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgpack

from llmnode import _native
from llmnode.core.user_input import Unreadable, decode, expand_path, read_file, split_lines
from llmnode.errors import ConfigError
from llmnode.wire.fields import ADDRESS_CHARS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEY_BYTES = 32
INVITE = "llmnode-invite-"
INVITED_PEERS = 16
"""Addresses in an invite, at most: one that knows the others is enough."""
_HEADER = "/key/swarm/psk/1.0.0/\n/base16/\n"
_CHECK_BYTES = 4
_INVITE_CHARS = 2 * (INVITED_PEERS * ADDRESS_CHARS + 100)
_FILE_BYTES = 2 * _INVITE_CHARS  # an invite in UTF-16


@dataclass(frozen=True, slots=True)
class Entry:
    """How to get into a swarm: addresses of peers that are in it, and its key, if it is private."""

    peers: tuple[str, ...]
    key: bytes | None = field(default=None, repr=False)


def entry(peers: Sequence[str], swarm_key: str | Path | None) -> Entry:
    """`swarm_key` is an invite, whose peers are added to `peers`, or names a file with one, or with the key itself.

    Raises ConfigError.
    """
    if swarm_key is None:
        return Entry(tuple(peers))
    if not isinstance(swarm_key, str) or not swarm_key.strip().startswith(INVITE):
        path = expand_path(str(swarm_key))
        if not (swarm_key := _read(path)).startswith(INVITE):
            return Entry(tuple(peers), _parse_key(swarm_key, path))
    invited = read_invite(swarm_key.strip())
    return Entry(tuple(dict.fromkeys((*peers, *invited.peers))), invited.key)


def read_key(path: Path) -> bytes:
    """Raises ConfigError if there is none, if it is no key, or if others can read it."""
    return _parse_key(_read(path), path)


def _read(path: Path) -> str:
    try:
        content = read_file(path, f"the swarm key {path}", _FILE_BYTES, secret=True)
    except Unreadable as error:
        if not error.is_missing:
            raise
        raise ConfigError(f"there is no swarm key {path}: `llmnode invite --swarm-key {path}` makes one") from error
    try:
        return decode(content, str(path)).strip()
    except ConfigError as error:
        raise _no_key(path) from error


def _parse_key(text: str, path: Path) -> bytes:
    *header, digits = split_lines(text) or [""]
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if header != _HEADER.split() or len(key) != KEY_BYTES:
        raise _no_key(path)
    return key


def _no_key(path: Path) -> ConfigError:
    return ConfigError(f"{path} is no swarm key: name another file, or have `llmnode invite` make one")


def make_key(path: Path) -> bytes:
    """A fresh one, in a new file for its owner's eyes alone. Raises ConfigError if it cannot be written."""
    key = secrets.token_bytes(KEY_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{_HEADER}{key.hex()}\n")
    except OSError as error:
        raise ConfigError(f"cannot write the swarm key {path} ({error.strerror}): name another file") from error
    return key


def write_invite(key: bytes, peers: Sequence[str]) -> str:
    """An invite for a future member: it is as secret as the key. Raises ConfigError for too many or too long peers."""
    if len(peers) > INVITED_PEERS or any(len(peer) > ADDRESS_CHARS for peer in peers):
        raise ConfigError(f"an invite names at most {INVITED_PEERS} peers of {ADDRESS_CHARS} characters")
    content: bytes = msgpack.packb([key, list(peers)])
    check = _native.crc32c(content).to_bytes(_CHECK_BYTES, "big")
    return INVITE + _encoded(check + content)


def read_invite(text: str) -> Entry:
    """Raises ConfigError for one that was cut or changed on its way."""
    damaged = ConfigError("this invite is damaged: copy the whole line that `llmnode invite` printed")
    body = text.removeprefix(INVITE)
    if not text.startswith(INVITE) or len(text) > _INVITE_CHARS:
        raise damaged
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        check, content = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
        if _native.crc32c(content).to_bytes(_CHECK_BYTES, "big") != check or _encoded(data) != body:
            raise damaged
        match msgpack.unpackb(content, strict_map_key=True):
            case [bytes(key), [*peers]] if len(key) == KEY_BYTES and len(peers) <= INVITED_PEERS:
                if all(isinstance(peer, str) and len(peer) <= ADDRESS_CHARS for peer in peers):
                    return Entry(tuple(peers), key)
    except (binascii.Error, ValueError, msgpack.UnpackException) as error:
        raise damaged from error
    raise damaged


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
