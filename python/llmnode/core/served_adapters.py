"""The adapters that a swarm announces, and the one among them that a client names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.ids import ADAPTER_ID_BYTES
from llmnode.core.peers.whereabouts import votes
from llmnode.core.route import uncovered
from llmnode.core.view import online

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.adapters import AnnouncedAdapter
    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import Profile
    from llmnode.core.span import Span

NAMED = 4
"""A message names at most this many adapters: peers may announce any number."""
_DIGEST = re.compile(f"[0-9a-fA-F]{{{2 * ADAPTER_ID_BYTES}}}")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter, and the servers that say that they hold it, all for one `profile`, which is that of the base."""

    adapter: AnnouncedAdapter
    profile: Profile
    servers: tuple[Announcement, ...]

    @property
    def missing(self) -> list[Span]:
        """The blocks of the model for which no server that is online holds it."""
        return uncovered(self.servers[0].offer.blocks, [each.offer.span for each in online(self.servers)])


def served_adapters(announcements: Sequence[Announcement]) -> list[ServedAdapter]:
    """The adapters that they announce, by model, name and digest. Those with other names or ranks are apart."""
    found: dict[tuple[Profile, AnnouncedAdapter], list[Announcement]] = {}
    for each in announcements:
        for adapter in dict.fromkeys(each.offer.adapters):
            found.setdefault((each.offer.profile, adapter), []).append(each)
    served = [ServedAdapter(adapter, profile, tuple(servers)) for (profile, adapter), servers in found.items()]
    return sorted(served, key=lambda each: (each.profile.key, each.adapter.name, each.adapter.digest))


def find_adapter(
    wanted: str, announcements: Sequence[Announcement], profile: Profile, met: Mapping[PeerId, str]
) -> ServedAdapter:
    """The adapter for the base of this `profile` whose name or digest, in hexadecimal, is `wanted`.

    `met` are the address groups of the peers that have answered. Raises ConfigError if nobody announces it, and if
    several adapters have that name.
    """
    of_model = [each for each in served_adapters(online(announcements)) if _is_of_model(each, profile)]
    served = [each for each in of_model if each.profile == profile]
    found = [each for each in served if _is_meant(each, wanted)]
    by_digest: dict[str, list[ServedAdapter]] = {}
    for each in found:
        by_digest.setdefault(each.adapter.digest.hex(), []).append(each)
    if len(by_digest) > 1:
        # Anyone can announce a name, so the digests that few can have made up are told first.
        likely = sorted(by_digest, key=lambda digest: (*_doubts(by_digest[digest], met), digest))
        some = ", ".join(likely[:NAMED])
        raise ConfigError(f"servers announce {len(likely)} adapters named {wanted!r}: give one by its digest, {some}")
    if not found:
        elsewhere = sorted({each.profile.precision.name for each in of_model if _is_meant(each, wanted)})[:NAMED]
        if elsewhere:
            raise ConfigError(
                f"no server announces the adapter {wanted!r} in {profile.precision.name}, which this client uses: "
                f"name a dtype in which it is announced, {' or '.join(elsewhere)}"
            )
        names = sorted({each.adapter.name for each in served})[:NAMED]
        there = f"there are {', '.join(names)}" if names else "none is announced for this model and precision"
        raise ConfigError(
            f"{wanted!r} is no folder, and no server announces an adapter of that name or digest: {there}. "
            "Give the folder of the adapter, or see `llmnode adapters`"
        )
    servers = {each.peer: each for one in found for each in one.servers}
    return ServedAdapter(found[0].adapter, profile, tuple(servers.values()))


def _is_of_model(served: ServedAdapter, profile: Profile) -> bool:
    return (served.profile.model_digest, served.profile.adapter) == (profile.model_digest, profile.adapter)


def _is_meant(served: ServedAdapter, wanted: str) -> bool:
    """Whether `wanted` is its name, or its digest in hexadecimal."""
    if _DIGEST.fullmatch(wanted):
        return served.adapter.digest.hex() == wanted.lower()
    return served.adapter.name == wanted


def _doubts(alike: Sequence[ServedAdapter], met: Mapping[PeerId, str]) -> tuple[bool, int]:
    """Whether the adapter of one digest is missing for some blocks, and minus the address groups that vote for it."""
    servers = [server for each in alike for server in each.servers]
    is_missing = bool(replace(alike[0], servers=tuple(servers)).missing)
    return is_missing, -len(votes((each.peer for each in servers), met))
