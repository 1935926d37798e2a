"""The peers of former runs, in a file of the cache: a swarm is found again when all peers that one names are gone.

A swarm is remembered by each peer that was named to join it, and by its key. So two swarms that know nothing of each
other stay apart. The file does not say which peers were named, nor the key. It has the addresses of the peers, those
of a private swarm too, and named ones are among them if they serve. It does not ask for the model: any peer knows the
servers of all models. Its addresses are claims of strangers: it vouches for none. The swarms of one key, or without
one, can be found by the key alone (`FormerPeers.swarms`): for invites.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llmnode.core.peers.dial_gate import PUBLIC, scope_of
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.policy import JoinPolicy
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.machine.cache_folder import cache_folder, write_in_cache
from llmnode.wire.fields import ADDRESS_CHARS

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

FILE = "peers.json"
VERSION = 1
MOST_BYTES = 4 << 20
"""More than a file with all that a `JoinPolicy` allows."""
MOST_SCOPES, MOST_SCOPE_CHARS = 8, 50
_LATEST_S = 1e12
"""No time since 1970 is as large. A file may hold a number that is too large for a float."""
_MACHINE = "machine"


class FormerPeers:
    """The peers that are remembered for `contacts`, the addresses by which a swarm is joined.

    A swarm on this machine alone is not remembered: its ports are others the next time.
    """

    def __init__(
        self,
        contacts: Sequence[str],
        swarm_key: bytes | None,
        policy: JoinPolicy | None = None,
        path: Path | None = None,
    ) -> None:
        self._policy = policy or JoinPolicy()
        self._path = path
        names = {peer_of(each) for each in contacts if _host_scope(each) != _MACHINE}
        self._keys = sorted(hmac.digest(swarm_key or b"", name.encode(), "sha256").hex() for name in names)
        self._of = swarm_name(swarm_key)
        scopes = {scope for each in contacts if (scope := _host_scope(each)) is not None}
        self._scopes = sorted(scopes - {_MACHINE, PUBLIC})

    def read(self, now_s: float) -> list[list[str]]:
        """The addresses of each peer, those of the latest run first. `now_s` is the time since 1970."""
        if not self._keys:
            return []
        swarms = self._read_all()
        of_ours = [swarms[key] for key in self._keys if key in swarms]
        peers: dict[str, list[str]] = {}
        for saved in sorted(of_ours, key=lambda each: -each["s"]):
            if abs(now_s - saved["s"]) <= self._policy.forget_after_s:  # a wrong clock may have written the future
                for addresses in saved["peers"]:
                    peers.setdefault(peer_of(addresses[0]), addresses)
        return list(peers.values())[: self._policy.former_peers]

    def swarms(self, now_s: float) -> list[list[list[str]]]:
        """The peers of each swarm under this key, as `read` returns them, whichever contacts were named; the latest
        swarm is first. Addresses in private networks are left out, except those in networks where a contact was.
        """
        found: list[list[list[str]]] = []
        for saved in sorted(self._read_all().values(), key=lambda each: -each["s"]):
            if saved["of"] != self._of or abs(now_s - saved["s"]) > self._policy.forget_after_s:
                continue
            allowed = {PUBLIC, *saved["scopes"]}
            peers = [[address for address in each if _host_scope(address) in allowed] for each in saved["peers"]]
            if (there := [each for each in peers if each]) and there not in found:
                found.append(there)
        return found

    def write(self, peers: Iterable[Sequence[str]], now_s: float) -> None:
        """Remember these, instead of those before, unless there are none. A file that cannot be written is logged.

        It is written if they are others than before, or after a day. If two processes write at the same moment, one of
        them is forgotten. It writes again if it runs on.
        """
        shortened = self._within_limits(peers)
        if not self._keys or not shortened:
            return
        swarms = self._read_all()
        if all(self._is_fresh(swarms.get(key), shortened, now_s) for key in self._keys):
            return
        entry = {"s": now_s, "peers": shortened, "of": self._of, "scopes": self._scopes}
        swarms |= dict.fromkeys(self._keys, entry)
        latest = sorted(swarms, key=lambda key: -swarms[key]["s"])[: self._policy.former_swarms]
        text = json.dumps({"version": VERSION, "swarms": {key: swarms[key] for key in latest}})
        try:
            write_in_cache(self._path or cache_folder(FILE), text, 0o600)
        except (OSError, ConfigError) as error:
            log.info("the peers of this run are not remembered: %s", error)

    def _is_fresh(self, saved: dict[str, Any] | None, peers: list[list[str]], now_s: float) -> bool:  # Any: JSON
        """Whether the file has these `peers`, in any order, since less than a day."""
        if saved is None or not 0 <= now_s - saved["s"] < self._policy.rewrite_after_s:
            return False
        return sorted(saved["peers"]) == sorted(peers) and (saved["of"], saved["scopes"]) == (self._of, self._scopes)

    def _read_all(self) -> dict[str, dict[str, Any]]:  # Any: JSON
        """A file that is damaged, of another version, or that somebody else could have written counts as none."""
        try:
            content = json.loads(read_file(self._path or cache_folder(FILE), FILE, MOST_BYTES))
            swarms = content["swarms"]
            if content["version"] != VERSION:
                return {}
            return {key: self._shortened(swarms[key]) for key in swarms if _is_whole(swarms[key])}
        except (ConfigError, ValueError, TypeError, KeyError, RecursionError):
            return {}

    def _shortened(self, saved: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        of, scopes = saved.get("of"), saved.get("scopes")  # llmnode 0.1.0 has not written them
        return {
            "s": saved["s"],
            "peers": self._within_limits(saved["peers"]),
            "of": of if isinstance(of, str) and len(of) == len(self._of) else "",
            "scopes": [each for each in scopes if _is_scope(each)][:MOST_SCOPES] if isinstance(scopes, list) else [],
        }

    def _within_limits(self, peers: Iterable[object]) -> list[list[str]]:
        known = ([address for address in each if is_address(address)] for each in peers if isinstance(each, Sequence))
        return [each[: self._policy.former_addresses] for each in known if each][: self._policy.former_peers]


def swarm_name(swarm_key: bytes | None) -> str:
    """A name for the swarms that have this key, or none. It does not tell the key."""
    return hmac.digest(swarm_key or b"", b"/swarm", "sha256").hex()


def _is_whole(saved: Any) -> bool:  # Any: JSON
    match saved:
        case {"s": int() | float() as time_s, "peers": [*_]}:
            return 0 <= time_s < _LATEST_S
    return False


def is_address(text: Any) -> bool:  # Any: JSON
    """Whether a text may be the address of a peer, with its id, and is short."""
    return isinstance(text, str) and len(text) <= ADDRESS_CHARS and text.isascii() and "/p2p/" in text


def _is_scope(text: Any) -> bool:  # Any: JSON
    return isinstance(text, str) and len(text) <= MOST_SCOPE_CHARS


def _host_scope(address: str) -> str | None:
    """The network in which the host of a multiaddr means something."""
    _, _, rest = address.partition("/")
    parts = rest.split("/")
    return scope_of(parts[1]) if len(parts) > 1 else None
