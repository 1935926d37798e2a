"""The key that the members of a private swarm share, in a file; and the way into a swarm, by a key or an invite.

It is mixed into every handshake (`secure.py`): a node without it connects to no member. The file has the form that IPFS
and other programs over libp2p use, so that their tools make and read it; but their way of encrypting with it is
another, so they are no members.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.user_input import Unreadable, decode, expand_path, read_file, split_lines
from llmnode.errors import ConfigError
from llmnode.net.invite import INVITE, KEY_BYTES, MOST_CHARS, Invite, is_invite, read_invite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_BEGINNING = "/key/swarm/psk/"
_HEADER = f"{_BEGINNING}1.0.0/\n/base16/\n"
_FILE_BYTES = 2 * MOST_CHARS  # an invite in UTF-16


def entry(
    peers: str | Sequence[str] | Invite,
    swarm_key: str | Path | Invite | None = None,
    invite: str | Path | Invite | None = None,
) -> Invite:
    """How to get into a swarm: peers that are in it, its key if it is private, and the model if an invite names one.

    `peers` are addresses, or one address, or an invite. `swarm_key` and `invite` are an invite, whose peers are added
    to `peers`, or name a file with one, or with the key itself. Raises ConfigError, also if there is more than one of
    an invite and a key: one of them would have to be dropped.
    """
    addresses, instead = _addresses(peers)
    given = [each for each in (swarm_key, invite, instead) if each is not None]
    if len(given) > 1:
        raise ConfigError(
            "an invite is given, and a swarm key or another invite too: leave one of them out; an invite has the key "
            "of its swarm, if that is private"
        )
    if not given:
        return Invite(addresses)
    found = _found(given[0])
    return replace(found, peers=tuple(dict.fromkeys((*addresses, *found.peers))))


def _addresses(peers: str | Sequence[str] | Invite) -> tuple[tuple[str, ...], str | Invite | None]:
    """The addresses, or the invite that is given instead."""
    if isinstance(peers, Invite):
        return (), peers
    if not isinstance(peers, str):
        return tuple(peers), None
    return ((), peers) if is_invite(peers) else ((peers,), None)


def _found(given: str | Path | Invite) -> Invite:
    if isinstance(given, Invite):
        return given
    if is_invite(given):
        return read_invite(str(given))
    path = expand_path(str(given))
    text = _read(path)
    return read_invite(text) if is_invite(text) else Invite((), _parse_key(text, path))


def is_invite_file(name: str) -> bool:
    """Whether `name` is the path of a file with an invite, which may be damaged. No model is in such a file."""
    try:
        path = expand_path(name)
        return os.path.isfile(path) and is_invite(decode(read_file(path, name, _FILE_BYTES)))
    except ConfigError:  # it is larger, no text, or not ours to read
        return False


def read_key(path: Path) -> bytes:
    """Raises ConfigError if there is none, if it is no key, or if others can read it."""
    return _parse_key(_read(path), path)


def _read(path: Path) -> str:
    try:
        content = read_file(path, f"the swarm key {path}", _FILE_BYTES, is_secret=_has_key)
    except Unreadable as error:
        if not error.is_missing:
            raise
        raise ConfigError(f"there is no swarm key {path}: `llmnode invite --swarm-key {path}` makes one") from error
    try:
        return decode(content, str(path)).strip()
    except ConfigError as error:
        raise _no_key(path) from error


def _has_key(content: bytes) -> bool:
    """Whether a file has a key, or is meant to: any other file is called so, and not a secret that others can read."""
    try:
        text = decode(content).strip()
        return read_invite(text).key is not None if is_invite(text) else text.startswith(_BEGINNING)
    except ConfigError:
        return INVITE.encode() in content or _BEGINNING.encode() in content


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
