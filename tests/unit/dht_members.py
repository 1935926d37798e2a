"""Hosts in one DHT, for its tests here and in `tests/interop`."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import LinkPolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.directory import DhtDirectory, open_directory
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.wire.announcement import sign_announcement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.announcement import SignedAnnouncement

POLICY = SwarmPolicy()
DIGEST = b"m" * 32
OFFER = Offer(
    "exact",
    Profile(DIGEST, Precision()),
    30,
    Span(0, 10),
    PeerState.ONLINE,
    block_us=1000,
    kv_tokens=64,
    kv_tokens_free=64,
)


@dataclass(frozen=True)
class Member:
    """A host in the DHT."""

    network: Libp2pNetwork
    directory: DhtDirectory

    @property
    def address(self) -> str:
        return self.network.addresses[0]

    def announcement(self, *, age_s: float = 0.0, **changes: Any) -> SignedAnnouncement:
        made_ms = int((time.time() - age_s) * 1000)
        announcement = Announcement(
            self.network.peer,
            tuple(self.network.addresses),
            made_ms,
            made_ms + int(1000 * POLICY.lifetime_s),
            "llmnode/test",
            replace(OFFER, **changes),
        )
        return sign_announcement(announcement, self.network.sign)


@asynccontextmanager
async def member(contact: str | None = None, *, listens: bool = True) -> AsyncIterator[Member]:
    listen = [LISTEN_ANY_LOOPBACK] if listens else []
    async with open_network(listen, LinkPolicy()) as network, open_directory(network, POLICY) as directory:
        if contact is not None:
            network.vouch([contact])
            await network.host.connect(parse_peer(contact))
        yield Member(network, directory)
