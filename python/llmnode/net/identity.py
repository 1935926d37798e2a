"""Who we are to other peers: an Ed25519 key, kept in a file when the peer id has to last."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from libp2p.crypto.ed25519 import Ed25519PrivateKey, Ed25519PublicKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from llmnode.core.given import Unreadable, expand_path, read_file
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.core.ids import PeerId

_SEED_BYTES = 32
_MOST_BYTES = 1 << 16
"""Of a file that may be something else."""


def fresh_identity() -> KeyPair:
    return create_new_key_pair()


def open_identity(path: Path) -> KeyPair:
    """The identity in the file at `path`, made first if there is none. The file is for its owner's eyes alone.

    Raises ConfigError if it cannot be read or written, is no identity, or is open to others.
    """
    path = expand_path(str(path))
    try:
        seed = read_file(path, f"the identity {path}", _MOST_BYTES, secret=True)
    except Unreadable as error:
        if not error.is_missing:
            raise
        return _make(path)
    if len(seed) != _SEED_BYTES:
        raise ConfigError(f"{path} is no identity: name another file, or remove it to have one made")
    return identity_of(seed)


def identity_of(seed: bytes) -> KeyPair:
    """The identity whose key these 32 bytes are."""
    private_key = Ed25519PrivateKey.new(seed)
    return KeyPair(private_key, private_key.get_public_key())


def is_signed(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether the holder of the key in `peer` signed `message`. Ids of other keys than Ed25519 cannot be checked."""
    public_key = _key_of(peer)
    try:
        return public_key is not None and public_key.verify(message, signature)
    except ValueError:  # a signature of the wrong size
        return False


@lru_cache(maxsize=4096)  # reading an id takes a quarter of a check, and few peers sign much
def _key_of(peer: PeerId) -> Ed25519PublicKey | None:
    """None for what is no id, for one without an Ed25519 key, and for another spelling of a key's own id."""
    try:
        public_key = ID.from_base58(peer).extract_public_key()
    except ValueError:  # no base58
        return None
    if not isinstance(public_key, Ed25519PublicKey) or ID.from_pubkey(public_key).to_base58() != peer:
        return None
    return public_key


def _make(path: Path) -> KeyPair:
    key_pair = create_new_key_pair()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(key_pair.private_key.to_bytes())
    except OSError as error:
        raise ConfigError(f"the identity {path}: cannot be written ({error.strerror}): name another file") from error
    return key_pair
