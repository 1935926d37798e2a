"""A node answers peers of protocol 1 with forms that they can read, and verifies each of these once."""

from __future__ import annotations

from dataclasses import replace

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import Source, View
from llmnode.swarm.old_forms import OldForms
from llmnode.swarm.view_exchange import ViewExchange
from llmnode.wire import version_1
from llmnode.wire.announcement import form_in_version_1, pack_sequences, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, pack
from unit.grown import sign_grown
from unit.in_trio import in_trio
from unit.wire.whole_payloads import unpack_news

POLICY = SwarmPolicy()
NOW_MS = 1_700_000_000_000
OFFER = Offer(
    "model",
    Profile(b"d" * 32, Precision()),
    30,
    Span(3, 7),
    PeerState.ONLINE,
    block_us=9,
    kv_tokens=9,
    kv_tokens_free=5,
)
SIGNATURE, FORGED = b"s" * 64, b"f" * 64


class Keys:
    """Verifies, and counts how often."""

    def __init__(self) -> None:
        self.verified = 0

    def verify(self, _peer: PeerId, _message: bytes, signature: bytes) -> bool:
        self.verified += 1
        return signature == SIGNATURE


def announced(peer: str, offer: Offer = OFFER) -> Announcement:
    return Announcement(PeerId(peer), (f"/ip4/1.2.3.4/tcp/5/p2p/{peer}",), NOW_MS, NOW_MS + 45_000, "llmnode/1", offer)


def exchange_of(*held: SignedAnnouncement) -> tuple[ViewExchange, Keys]:
    view, keys = View(POLICY), Keys()
    for each in held:
        assert view.accept(each, NOW_MS, Source(PeerId("teller"), "10.0.0.0/24"))
    return ViewExchange(view, POLICY, lambda: NOW_MS, OldForms(keys.verify, POLICY.view_peers)), keys


async def told(exchange: ViewExchange, version: int, known: dict[PeerId, int]) -> list[tuple[bytes, bytes]]:
    """The bodies and signatures that a peer of this version is given, which knows these sequence numbers."""
    question = Frame(FrameType.VIEW, meta=pack(Clock(NOW_MS)), payload=pack_sequences(known))
    return list(unpack_news((await exchange.answer(question, version)).payload, POLICY).pairs)


@in_trio
async def test_a_peer_of_protocol_1_is_given_what_it_lacks_and_can_read() -> None:
    plain = sign_announcement(announced("plain"), lambda _body: SIGNATURE)
    grown = sign_grown(announced("grown"), lambda _body: SIGNATURE)
    unsigned = sign_grown(announced("unsigned"), lambda _body: FORGED)
    of_adapter = replace(OFFER, profile=replace(OFFER.profile, adapter=b"a" * 32))
    adapted = sign_announcement(announced("adapted", of_adapter), lambda _body: SIGNATURE)
    assert form_in_version_1(adapted) is None, "it would be taken for the model without an adapter"
    exchange, _ = exchange_of(plain, grown, unsigned, adapted)
    old = form_in_version_1(grown)
    assert old is not None
    expected = {(plain.signed.body, SIGNATURE), (old.body, SIGNATURE)}
    assert set(await told(exchange, version_1.VERSION, {})) == expected
    known = {PeerId("plain"): NOW_MS, PeerId("grown"): NOW_MS - 1}
    assert await told(exchange, version_1.VERSION, known) == []
    assert len(await told(exchange, version_1.VERSION + 1, {})) == 4, "all of them, as they were signed"


@in_trio
async def test_older_forms_are_verified_for_peers_of_protocol_1_alone_and_once() -> None:
    held = [sign_grown(announced(f"peer{number}"), lambda _body: SIGNATURE) for number in range(40)]
    exchange, keys = exchange_of(*held)
    await told(exchange, version_1.VERSION + 1, {})
    await told(exchange, version_1.VERSION, {each.announcement.peer: NOW_MS - 1 for each in held})
    assert keys.verified == 0, "nobody lacks one"
    for _ in range(3):
        assert len(await told(exchange, version_1.VERSION, {})) == 40
    assert keys.verified == 40
