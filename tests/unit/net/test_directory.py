"""The DHT directory and identities over real libp2p hosts in one process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import msgpack
import pytest
from libp2p.peer.id import ID

from llmnode.core.model import Precision, Profile
from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.net.directory import _AnnouncementValidator, _peer_key
from llmnode.net.host import open_network
from llmnode.wire.announcement import SIGNING_CONTEXT, form_in_version_1
from unit.dht_members import DIGEST, OFFER, POLICY, Member, member
from unit.grown import sign_grown
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmnode.core.announcement import Offer, SignedAnnouncement, SignedBody
    from llmnode.core.ids import PeerId


@in_trio
async def test_who_serves_a_model_is_found_through_a_relay_that_holds_nothing() -> None:
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(member())
        servers = [await stack.enter_async_context(member(relay.address)) for _ in range(3)]
        offers = {server.network.peer: OFFER for server in servers}
        other = await stack.enter_async_context(member(relay.address))
        await other.directory.publish(other.announcement(profile=Profile(b"o" * 32, Precision())))
        client = await stack.enter_async_context(member(relay.address, listens=False))
        await until_found(client, servers, offers)
        # A provider finds the others too, and their latest values.
        offers[servers[1].network.peer] = replace(OFFER, span=Span(10, 20))
        await until_found(servers[0], servers, offers)


async def until_found(asking: Member, servers: Sequence[Member], offers: Mapping[PeerId, Offer]) -> None:
    """Nodes publish and ask again and again, for on a busy machine somebody may be too late."""
    found: dict[PeerId, Offer] = {}
    while found != offers:
        for server in servers:
            await server.directory.publish(server.announcement(span=offers[server.network.peer].span))
        found = {each.announcement.peer: each.announcement.offer for each in await asking.directory.find(DIGEST)}


@in_trio
async def test_peers_of_the_dht_lead_on_to_who_may_keep_an_announcement() -> None:
    async with member() as between, member(between.address) as keeper, member(between.address) as client:
        await keeper.directory.publish(keeper.announcement())  # so that the peer between knows it for a server
        routing, key = client.directory._dht.peer_routing, _peer_key(keeper.network.peer).encode()
        led_to = await routing._query_peer_for_closest(ID.from_string(between.network.peer), key)
        assert keeper.network.peer in {str(peer) for peer in led_to}


@in_trio
async def test_nothing_is_found_of_a_model_that_nobody_serves_or_in_no_swarm_at_all() -> None:
    async with member() as relay, member(relay.address, listens=False) as client, member(listens=False) as hermit:
        assert await client.directory.find(DIGEST) == []
        assert await hermit.directory.find(DIGEST) == []
        await hermit.directory.publish(hermit.announcement())


@in_trio
async def test_the_record_of_a_newer_node_is_the_form_that_nodes_of_protocol_1_keep() -> None:
    async with member() as relay, member(relay.address) as newer, member(relay.address, listens=False) as client:
        grown = sign_grown(newer.announcement().announcement, newer.network.sign)
        found: Sequence[SignedAnnouncement] = []
        while not found:  # on a busy machine somebody may be too late
            await newer.directory.publish(grown)
            found = await client.directory.find(DIGEST)
        assert [each.signed for each in found] == [form_in_version_1(grown)]


@in_trio
async def test_peers_of_the_dht_keep_only_what_its_peer_signed_and_what_still_holds() -> None:
    async with member() as honest, member() as other:
        validator = _AnnouncementValidator(POLICY)

        def validate(key: str, signed: SignedBody) -> None:
            validator.validate(key, msgpack.packb((signed.body, signed.signature)))

        key = _peer_key(honest.network.peer)
        good = honest.announcement().signed
        validate(key, good)
        for reason, wrong_key, signed in [
            ("another peer", _peer_key(other.network.peer), good),
            ("not signed", key, replace(good, signature=other.network.sign(SIGNING_CONTEXT + good.body))),
            ("not signed", key, replace(good, signature=honest.network.sign(good.body))),
            ("expired", key, honest.announcement(age_s=POLICY.lifetime_s + 1).signed),
            ("from the future", key, honest.announcement(age_s=-3600).signed),
        ]:
            with pytest.raises(ValueError, match=reason):
                validate(wrong_key, signed)
        for record in (b"", b"\x00", b"\xc1", b"\x92\xc4\x00\xc4\x00", bytes(10_000)):
            with pytest.raises(ValueError, match="nnouncement"):
                validator.validate(key, record)


# Identities


@in_trio
async def test_an_identity_in_a_file_is_the_same_peer_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "identity"
    peers = []
    for _life in range(2):
        async with open_network([], LinkPolicy(), file) as network:
            peers.append(network.peer)
    assert peers[0] == peers[1]
    assert file.stat().st_mode & 0o777 == 0o600


@in_trio
async def test_a_file_that_is_no_identity_is_named_with_its_fix(tmp_path: Path) -> None:
    file = tmp_path / "identity"
    for content, mode, fix in [(b"x" * 32, 0o644, "chmod 600"), (b"short", 0o600, "remove it")]:
        file.write_bytes(content)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=fix):
            async with open_network([], LinkPolicy(), file):
                pass
    with pytest.raises(ConfigError, match="name another file"):
        async with open_network([], LinkPolicy(), tmp_path):
            pass


@in_trio
async def test_only_the_holder_of_the_key_can_sign() -> None:
    async with open_network([], LinkPolicy()) as one, open_network([], LinkPolicy()) as other:
        signature = one.sign(b"message")
        assert other.verify(one.peer, b"message", signature)
        for peer, message, wrong in [
            (other.peer, b"message", signature),
            (one.peer, b"another", signature),
            (one.peer, b"message", signature[:10]),
            (one.peer[:20], b"message", signature),
            ("", b"message", signature),
            ("0OIl", b"message", signature),
        ]:
            assert not other.verify(peer, message, wrong)  # type: ignore[arg-type]  # not every string is a PeerId
