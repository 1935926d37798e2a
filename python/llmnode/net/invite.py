"""An invite: one line of text with all that it takes to join a swarm. It has peers, and perhaps a model and a key.

An invite with the key of a private swarm is as secret as that key. Opens no connection.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from llmnode import _native
from llmnode.core.hub_names import HUB, split_hub_name
from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.wire.fields import ADDRESS_CHARS

if TYPE_CHECKING:
    from collections.abc import Sequence

INVITE = "llmnode-invite-"
KEY_BYTES = 32
INVITED_PEERS = 16
"""Addresses in an invite, at most: one that knows the others is enough."""
MODEL_CHARS = 200
MOST_CHARS = 2 * (INVITED_PEERS * ADDRESS_CHARS + MODEL_CHARS + 100)
_MODEL = "model"
_HUB_NAMES = "a model on the Hugging Face hub (org/name or org/name@revision)"
_CHECK_BYTES = 4


@dataclass(frozen=True, slots=True)
class Invite:
    """The addresses of `peers`, the `key` of a private swarm, and the `model` by its name on the Hugging Face hub.

    Without a model, each one that joins names it. It is never a path: the invite of a stranger must not have a folder
    of the reader's machine loaded and served.

    Peers that are only `is_near` are strangers: mDNS has named them. The text of an invite does not say it.
    """

    peers: tuple[str, ...]
    key: bytes | None = field(default=None, repr=False)
    model: str | None = None
    is_near: bool = False

    @property
    def hub_model(self) -> str | None:
        """The model for `open_model`, which takes it from the hub, whatever folders there are here."""
        return None if self.model is None else f"{HUB}{self.model}"


def is_invite(text: object) -> bool:
    """Whether it is meant to be an invite. It may be damaged."""
    return isinstance(text, str) and text.strip().startswith(INVITE)


def write_invite(invite: Invite) -> str:
    """The text of an invite. Raises ConfigError for too many or too long peers, and for no or too long a hub name."""
    if len(invite.peers) > INVITED_PEERS or any(len(peer) > ADDRESS_CHARS for peer in invite.peers):
        raise ConfigError(f"an invite names at most {INVITED_PEERS} peers of {ADDRESS_CHARS} characters")
    if len(invite.model or "") > MODEL_CHARS:
        raise ConfigError(f"an invite names a model of at most {MODEL_CHARS} characters")
    if invite.model is not None and split_hub_name(invite.model) is None:
        raise ConfigError(f"an invite names {_HUB_NAMES}, and not {invite.model!r}")
    if invite.key is not None and invite.model is None:
        # The form of before: it says all, and an older llmnode can read it.
        return _sealed([invite.key, list(invite.peers)])
    more = {} if invite.model is None else {_MODEL: invite.model}
    return _sealed([invite.key, [_shortened(peer) for peer in invite.peers], more])


def read_invite(text: str) -> Invite:
    """Raises ConfigError for one that was cut or changed on its way, that names no model of the hub, or that a newer
    llmnode made.
    """
    text = text.strip()
    damaged = ConfigError("this invite is damaged: copy the whole line that `llmnode invite` printed")
    body = text.removeprefix(INVITE)
    if not text.startswith(INVITE) or len(text) > MOST_CHARS:
        raise damaged
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        check, content = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
        if _native.crc32c(content).to_bytes(_CHECK_BYTES, "big") != check or _encoded(data) != body:
            raise damaged
        found = _parsed(msgpack.unpackb(content, strict_map_key=True))
    except (binascii.Error, ValueError, msgpack.UnpackException) as error:
        raise damaged from error
    if found is None:
        raise damaged
    if found.model is not None and split_hub_name(found.model) is None:
        raise ConfigError(f"this invite names the model {found.model!r}, which is not {_HUB_NAMES}: get another one")
    return found


def _parsed(content: Any) -> Invite | None:  # Any: what msgpack can hold
    """None for what no version has written. Raises ConfigError for a newer version."""
    more: Any = {}
    match content:
        case [key, [*peers]]:
            pass
        case [key, [*peers], {**more}]:
            pass
        case [_, [*_], {}, *_]:
            raise ConfigError("this invite is of a newer llmnode: get a newer one")
        case _:
            return None
    if not (key is None or (isinstance(key, bytes) and len(key) == KEY_BYTES)) or len(peers) > INVITED_PEERS:
        return None
    model, addresses = more.get(_MODEL), [_address(peer) for peer in peers]
    if not (model is None or (isinstance(model, str) and 1 <= len(model) <= MODEL_CHARS and printable(model) == model)):
        return None
    known = [each for each in addresses if each is not None and len(each) <= ADDRESS_CHARS]
    return Invite(tuple(known), key, model) if len(known) == len(peers) else None


def _shortened(peer: str) -> str | bytes:
    """A multiaddr becomes bytes, which take half the space. Any other text stays."""
    try:
        short = Multiaddr(peer).to_bytes()
    except (MultiaddrError, ValueError):
        return peer
    return short if _address(short) == peer else peer


def _address(peer: Any) -> str | None:  # Any: what msgpack can hold
    if isinstance(peer, str):
        return peer
    if not isinstance(peer, bytes) or len(peer) > ADDRESS_CHARS:
        return None
    try:
        return str(Multiaddr(peer))
    except (MultiaddrError, ValueError):
        return None


def _sealed(content: Sequence[object]) -> str:
    packed: bytes = msgpack.packb(content)
    check = _native.crc32c(packed).to_bytes(_CHECK_BYTES, "big")
    return INVITE + _encoded(check + packed)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")
