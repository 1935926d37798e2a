"""The nodes that run on this machine, each in a file of the cache: `llmnode invite` and `status` find them so.

mDNS tells of no relay and of no private swarm, and works in private networks alone. A file has the addresses of its
node, and those that its user has named to join the swarm. It says by a digest which swarm that is, and not the key. It
is deleted when the node ends in order. That of a node that was killed counts for some minutes more. It says which peer
the node is: one whose relay is lost has no address of its own, and then those of others come first.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import trio

from llmnode.core.ids import PeerId
from llmnode.core.policy import JoinPolicy
from llmnode.core.user_input import read_file
from llmnode.errors import ConfigError
from llmnode.machine.cache_disk import in_time
from llmnode.machine.cache_folder import cache_folder, write_in_cache
from llmnode.swarm.former_peers import is_address, swarm_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llmnode.net.host import Libp2pNetwork

log = logging.getLogger(__name__)

FOLDER = "nodes"
VERSION = 2
MOST_BYTES = 16 << 10
MOST_NODES = 32
"""The files that are read, the newest ones."""
MOST_ADDRESSES = 16
MOST_PEER_CHARS = 100


@dataclass(frozen=True, slots=True)
class NotedNode:
    """A node of this machine. Its own addresses are first, if it has any, and those that its user has named follow."""

    peer: PeerId
    addresses: list[str]
    listening: list[str] = field(default_factory=list)
    """Where it listens without announcing it: its machine dials it there, also where a router has no hairpin NAT."""
    began_s: float = field(default=0.0, compare=False)
    """When it was started, in seconds since 1970."""


async def note_running(
    network: Libp2pNetwork,
    contacts: Sequence[str],
    swarm_key: bytes | None,
    policy: JoinPolicy | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Keep the file of a node until this is cancelled. One that cannot be written is logged, once.

    It has started when the file is there, or could not be written in time: a home folder on a network may hang. Then a
    thread goes on with it, and the node does not wait.
    """
    every_s, told, began_s = (policy or JoinPolicy()).remember_every_s, False, time.time()
    try:
        while True:
            addresses = [*network.addresses, *contacts][:MOST_ADDRESSES]
            content = {"version": VERSION, "of": swarm_name(swarm_key), "s": began_s, "peer": network.peer}
            content["addresses"] = addresses
            content["listening"] = [each for each in network.listening if each not in addresses][:MOST_ADDRESSES]
            why = await _failure(partial(_write, network.peer, json.dumps(content)))
            if why and not told:
                log.info("`llmnode invite` will not find this node: %s", why)
            told = told or bool(why)
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            with trio.move_on_after(every_s):
                await network.wait_addresses_changed()
    finally:
        with trio.CancelScope(shield=True):
            await _failure(partial(_unlink, network.peer))


async def _failure(work: Callable[[], None]) -> str:
    """Why the `work` on the disk has failed; "" if it has not."""
    try:
        await in_time(work)
    except (OSError, ConfigError) as error:
        return str(error)
    return ""


def _write(peer: str, text: str) -> None:
    write_in_cache(_file(peer), text, 0o600)


def _unlink(peer: str) -> None:
    _file(peer).unlink(missing_ok=True)


def running_nodes(swarm_key: bytes | None, policy: JoinPolicy | None = None) -> list[NotedNode]:
    """The nodes of this swarm that run, or have been killed a moment ago. The one that has been started last is first.

    Files of nodes that are gone are deleted.
    """
    lifetime_s, now_s = 3 * (policy or JoinPolicy()).remember_every_s, time.time()
    living: list[tuple[float, Path]] = []
    with suppress(OSError, ConfigError):
        for file in cache_folder(FOLDER).glob("*.json"):
            with suppress(OSError):  # its node has ended at this moment
                if abs(now_s - (written_s := file.stat().st_mtime)) < lifetime_s:
                    living.append((written_s, file))
                else:
                    file.unlink()
    found: list[NotedNode] = []
    for number, (_, file) in enumerate(sorted(living, reverse=True)):
        if number < MOST_NODES:
            found += _read(file, swarm_name(swarm_key))
        else:
            with suppress(OSError):
                file.unlink()
    return sorted(found, key=lambda each: -each.began_s)


def _read(file: Path, swarm: str) -> list[NotedNode]:
    """The node of a file. Empty for one of another swarm, and for a file that is damaged."""
    try:
        content = json.loads(read_file(file, str(file), MOST_BYTES))
        if (content["version"], content["of"]) != (VERSION, swarm):
            return []
        addresses, listening = (
            [each for each in told if is_address(each)][:MOST_ADDRESSES]
            for told in (content["addresses"], content.get("listening", []))  # an earlier version has not written it
        )
        peer = content["peer"]
        is_peer = isinstance(peer, str) and len(peer) <= MOST_PEER_CHARS
        return [NotedNode(PeerId(peer), addresses, listening, float(content["s"]))] if is_peer else []
    except (ConfigError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return []


def _file(peer: str) -> Path:
    return cache_folder(FOLDER, f"{peer}.json")
