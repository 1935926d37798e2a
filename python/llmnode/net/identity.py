"""Our identity: an Ed25519 key, kept in a file when the peer id has to last."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from libp2p.crypto.ed25519 import Ed25519PrivateKey, Ed25519PublicKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from llmnode.core.user_input import expand_path
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from llmnode.core.ids import PeerId

log = logging.getLogger(__name__)

_SEED_BYTES = 32


def fresh_identity() -> KeyPair:
    return create_new_key_pair()


def opened(identity: Path | bytes | None) -> AbstractContextManager[KeyPair]:
    """The identity in a file, or of a key, or a fresh one. Raises as `open_identity`."""
    if isinstance(identity, bytes):
        return nullcontext(identity_of(identity))
    return nullcontext(fresh_identity()) if identity is None else open_identity(identity)


@contextmanager
def open_identity(path: Path) -> Iterator[KeyPair]:
    """The identity in the file at `path`, made first if there is none. The file is for its owner's eyes alone.

    Within the context no other node on this machine can use the file. Raises ConfigError if one does, or if the file
    cannot be read or written, is no identity, or is open to others.
    """
    path = expand_path(str(path))
    with ExitStack() as stack:
        try:
            if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
                raise ConfigError(f"the identity {path} is no file: name another file")
            file = stack.enter_context(_opened(path))
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"the identity {path} can be read by others: `chmod 600 {path}`")
            seed = file.read(_SEED_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot use the identity {path} ({error.strerror}): name another file") from error
        if len(seed) != _SEED_BYTES:
            raise ConfigError(f"{path} is no identity: name another file, or remove it to have one made")
        _lock(file, path)
        yield identity_of(seed)


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
    """The key of a peer id. None if it is not a valid id, has no Ed25519 key, or spells its key's own id otherwise."""
    try:
        public_key = ID.from_base58(peer).extract_public_key()
    except ValueError:  # no base58
        return None
    if not isinstance(public_key, Ed25519PublicKey) or ID.from_pubkey(public_key).to_base58() != peer:
        return None
    return public_key


def _opened(path: Path) -> BinaryIO:
    """The file, open for reading."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        with suppress(FileExistsError):  # another node has just made it
            _make(path)
        return path.open("rb")


def _make(path: Path) -> None:
    """Whole or not at all. It is told: a mistyped path would change the peer id without a word."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(create_new_key_pair().private_key.to_bytes())
    except OSError:  # as on a full disk
        path.unlink()
        raise
    log.warning("made a new identity, kept in %s: the peer id is new, and the same from now on", path)


def _lock(file: BinaryIO, path: Path) -> None:
    """Until the file is closed. The lock is on the file itself, which may be on a read-only disk."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = _locked_by(file)
        by = "this program" if process == os.getpid() else f"process {process}" if process else "another process"
        raise ConfigError(
            f"the identity {path} is in use by {by} on this machine, and two nodes with one identity hide each other: "
            "give this node another --identity FILE, or stop the other one"
        ) from None
    except OSError:  # a file system without locks: nodes notice a double by its announcements
        return


def _locked_by(file: BinaryIO) -> int | None:
    """The process, where the system says so (Linux), and it is not in another container."""
    inode = str(os.fstat(file.fileno()).st_ino)
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 4711 08:01:123456 0 EOF
            if len(fields := line.split()) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                return int(fields[4]) if int(fields[4]) > 0 else None
    return None
