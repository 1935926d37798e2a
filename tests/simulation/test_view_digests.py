"""Nodes that exchange large views by digests: what they know afterwards, what it costs, and older nodes beside them."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.budget import Resource
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import ServePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import Source
from llmnode.core.view_digests import BUCKETS, ENTRY_BYTES
from llmnode.errors import PeerTimeout, RemoteProtocolError
from llmnode.node.serve import links
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.links import accept_links, answer_as_relay
from llmnode.swarm.membership import Swarm
from llmnode.swarm.pool import open_pool
from llmnode.testing import Conditions, seeds, simulated, simulated_ms
from llmnode.testing.link import MemoryLink
from llmnode.testing.network import MemoryNetwork, _signature, open_internet, peer_named
from llmnode.testing.world import raise_bug
from llmnode.wire.announcement import pack_news, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.view_digests import ASKED_AT_ONCE
from unit.grown import sign_grown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

    from llmnode.ports import Link

OFFER = Offer(
    "model", Profile(b"d" * 32, Precision()), 30, Span(3, 7), PeerState.ONLINE,
    block_us=900, kv_tokens=9, kv_tokens_free=5,
)  # fmt: skip
DIGESTS_ALWAYS = SwarmPolicy(digest_peers=1)
FULL = SwarmPolicy().view_peers


def announced(number: int, age_ms: int) -> SignedAnnouncement:
    """By a peer whose id is as long as real ones. It has no address, so nobody connects to it."""
    peer, sequence = PeerId(f"12D3KooW{number:044}"), simulated_ms() - age_ms
    announcement = Announcement(peer, (), sequence, sequence + 45_000, "llmnode/1", OFFER)
    return sign_announcement(announcement, partial(_signature, peer))


def tell(swarm: Swarm, announcements: Iterable[SignedAnnouncement]) -> None:
    for each in announcements:
        swarm.view.accept(each, simulated_ms(), Source(PeerId("somebody"), "192.0.2.0/24"))


@asynccontextmanager
async def two_nodes(policy: SwarmPolicy, *, old: Collection[PeerId] = ()) -> AsyncIterator[tuple[Swarm, Swarm]]:
    """They exchange when the test says so. The other one answers, and is of protocol 1 if it is `old`."""
    async with open_internet(Conditions(delay_s=0.05)) as internet, trio.open_nursery() as nursery:
        internet.old |= set(old)
        networks = internet.network("one"), internet.network("other")
        async with open_pool(networks[0]) as one_pool, open_pool(networks[1]) as other_pool:
            one = Swarm(networks[0], one_pool, policy, now_ms=simulated_ms)
            other = Swarm(networks[1], other_pool, policy, now_ms=simulated_ms)
            answer = partial(answer_as_relay, other, Conduct(ServePolicy()))
            nursery.start_soon(accept_links, networks[1], 4, answer, raise_bug)
            yield one, other
        nursery.cancel_scope.cancel()


async def exchange(one: Swarm, other: Swarm) -> None:
    """Until everything that was sent has arrived."""
    await one.meet(f"/memory/p2p/{other.peer}")
    await trio.sleep(1)


@pytest.mark.parametrize("seed", seeds(12))
@simulated
async def test_after_an_exchange_both_know_the_newest_announcement_of_every_peer(seed: int) -> None:
    rng = random.Random(seed)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        for number in range(rng.choice((1, 10, 300, 1000))):
            old, new = announced(number, 9000), announced(number, rng.randrange(9000))
            tell(one, rng.choice(([], [old], [new], [new])))
            tell(other, rng.choice(([], [old], [new], [new])))
        tell(one, [announced(5000, 0)])
        before = one.view.sequences(), other.view.sequences()
        newest = {
            peer: max(held.get(peer, 0) for held in before) for peer in {peer for held in before for peer in held}
        }
        await exchange(one, other)
        assert one.view.sequences() == other.view.sequences() == newest


@dataclass
class Sent:
    """The bytes of all frames: those of NEWS, and those of questions and lists."""

    news_bytes: int = 0
    other_bytes: int = 0


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent, send = Sent(), MemoryLink.send

    async def count(self: MemoryLink, frame: Frame) -> None:
        if frame.type is FrameType.NEWS:
            sent.news_bytes += frame.size_bytes
        else:
            sent.other_bytes += frame.size_bytes
        await send(self, frame)

    monkeypatch.setattr(MemoryLink, "send", count)
    return sent


@pytest.mark.parametrize(("differences", "most_bytes"), [(0, 2300), (1, 2800), (40, 14_500), (FULL, 126_000)], ids=str)
@pytest.mark.parametrize("by_digests", [False, True], ids=["sequences", "digests"])
@simulated
async def test_the_cost_of_an_exchange_at_4096_peers(
    by_digests: bool, differences: int, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before digests, and to older peers, it was 258 kB whatever the difference."""
    sent = sent_bytes(monkeypatch)
    policy = SwarmPolicy() if by_digests else SwarmPolicy(digest_peers=FULL + 1)
    async with two_nodes(policy) as (one, other):
        old = [announced(number, 9000) for number in range(FULL)]
        tell(one, old)
        tell(other, [announced(number, 0) for number in range(differences)])
        tell(other, old[differences:])
        await exchange(one, other)
        assert one.view.sequences() == other.view.sequences()
    if by_digests:
        assert most_bytes * 0.8 < sent.other_bytes <= most_bytes
    else:
        assert 258_000 < sent.other_bytes < 258_200
    assert differences * 300 <= sent.news_bytes < 100 + differences * 450, "no announcement is sent in vain"


def know_no_digests(peers: Collection[PeerId], monkeypatch: pytest.MonkeyPatch) -> list[tuple[PeerId, FrameType]]:
    """From now on these are as old: of protocol 2, without digests. The list has their questions and those to them."""
    answer = links.answer_any
    asked: list[tuple[PeerId, FrameType]] = []

    async def answer_as_old(swarm: Swarm, conduct: Conduct, link: Link, frame: Frame) -> None:
        if swarm.peer in peers:
            asked.append((link.peer, frame.type))
            if frame.type in (FrameType.DIGESTS, FrameType.MISSING):
                frame = replace(frame, type=FrameType(99))
        await answer(swarm, conduct, link, frame)

    monkeypatch.setattr(links, "answer_any", answer_as_old)
    return asked


@simulated
async def test_a_peer_that_knows_no_digests_is_asked_for_them_once_and_then_sent_sequence_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = know_no_digests({peer_named("other")}, monkeypatch)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        tell(one, [announced(1, 0), announced(2, 9000)])
        tell(other, [announced(2, 0), announced(3, 0)])
        await exchange(one, other)
        await exchange(one, other)
        assert one.view.sequences() == other.view.sequences()
        assert len(one.view.sequences()) == 3
    kinds = [kind for _, kind in asked]
    assert kinds == [FrameType.DIGESTS, FrameType.VIEW, FrameType.NEWS, FrameType.VIEW]


@simulated
async def test_a_peer_of_protocol_1_is_sent_sequence_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = know_no_digests({peer_named("other")}, monkeypatch)
    async with two_nodes(DIGESTS_ALWAYS, old={peer_named("other")}) as (one, other):
        tell(one, [announced(1, 0)])
        tell(other, [announced(2, 0)])
        await exchange(one, other)
        assert one.view.sequences() == other.view.sequences()
        assert len(one.view.sequences()) == 2
    assert [kind for _, kind in asked] == [FrameType.VIEW, FrameType.NEWS]


@simulated
async def test_entries_that_a_peer_invents_cost_questions_that_are_no_larger_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer says that all buckets differ, and lists 8,192 entries, the most that are read. It gets what we know."""
    sent, answer = sent_bytes(monkeypatch), links.answer_any
    rng = random.Random(1)

    async def invent(swarm: Swarm, conduct: Conduct, link: Link, frame: Frame) -> None:
        if frame.type is FrameType.DIGESTS:
            payload = b"\xff" * (BUCKETS // 8) + rng.randbytes(2 * FULL * ENTRY_BYTES)
            clock = (await swarm._view_exchange.answer(frame, link.version)).meta
            await link.send(Frame(FrameType.DIFFERING, step=frame.step, meta=clock, payload=payload))
        else:
            await answer(swarm, conduct, link, frame)

    monkeypatch.setattr(links, "answer_any", invent)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        tell(one, [announced(number, 0) for number in range(10)])
        known = one.view.sequences()
        await exchange(one, other)
        assert one.view.sequences() == other.view.sequences() == known
    assert sent.other_bytes < 4096 + 2 * FULL * (ENTRY_BYTES + 12)
    assert sent.news_bytes < 10 * 450 + 200


@simulated
async def test_a_peer_that_tells_more_than_it_was_asked_for_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it tells would have to be verified."""
    answer, unasked = links.answer_any, [announced(number, 0) for number in range(ASKED_AT_ONCE + 1)]

    async def tell_more(swarm: Swarm, conduct: Conduct, link: Link, frame: Frame) -> None:
        if frame.type is FrameType.MISSING:
            clock = (await swarm._view_exchange.answer(frame, link.version)).meta
            payload = pack_news([each.signed for each in unasked], (), SwarmPolicy())
            await link.send(Frame(FrameType.NEWS, step=frame.step, meta=clock, payload=payload))
        else:
            await answer(swarm, conduct, link, frame)

    monkeypatch.setattr(links, "answer_any", tell_more)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        tell(one, [announced(FULL, 0)])
        tell(other, [announced(FULL + 1, 0)])
        with pytest.raises(RemoteProtocolError, match="1025 announcements, and 1024 were asked for"):
            await exchange(one, other)
        assert len(one.view) == 1


@simulated
async def test_a_peer_that_answers_slowly_holds_an_exchange_up_no_longer_than_one_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked four times for missing announcements, and takes 2 s each. Two of these answers are believed."""
    answer = links.answer_any

    async def answer_late(swarm: Swarm, conduct: Conduct, link: Link, frame: Frame) -> None:
        if frame.type is FrameType.MISSING:
            await trio.sleep(2)
        await answer(swarm, conduct, link, frame)

    monkeypatch.setattr(links, "answer_any", answer_late)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        tell(one, [announced(FULL, 0)])
        tell(other, [announced(number, 0) for number in range(4 * ASKED_AT_ONCE - 1)])
        began_s = trio.current_time()
        with pytest.raises(PeerTimeout):
            await exchange(one, other)
        assert trio.current_time() - began_s < DIGESTS_ALWAYS.exchange_timeout_s + 1
        assert len(one.view) == 2 * ASKED_AT_ONCE + 1


@simulated
async def test_the_time_that_a_node_takes_to_verify_is_not_counted_against_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge = Swarm._merge

    async def merge_slowly(self: Swarm, *arguments: Any, **named: Any) -> None:  # Any: passed on
        await trio.sleep(2)
        await merge(self, *arguments, **named)

    monkeypatch.setattr(Swarm, "_merge", merge_slowly)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        tell(one, [announced(FULL, 0)])
        tell(other, [announced(number, 0) for number in range(4 * ASKED_AT_ONCE - 1)])
        await exchange(one, other)
        assert len(one.view) == FULL


@pytest.mark.parametrize("by_digests", [False, True], ids=["sequences", "digests"])
@simulated
async def test_while_an_answer_is_made_the_link_holds_its_bytes_as_an_answer(
    by_digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a link that is chosen to make way is none that holds much for a moment."""
    held: list[tuple[Link, int, int]] = []
    async with two_nodes(DIGESTS_ALWAYS if by_digests else SwarmPolicy()) as (one, other):
        answer = other.answer

        async def note_held(frame: Frame, link: Link) -> Frame:
            made = await answer(frame, link)
            held.append((link, link.scope.held[Resource.ANSWERS], other.most_answer_bytes))
            return made

        monkeypatch.setattr(other, "answer", note_held)
        tell(one, [announced(1, 0)])
        tell(other, [announced(2, 0), announced(3, 0)])
        await exchange(one, other)
        assert len(held) == 1 + by_digests
        for link, while_made, answer_bytes in held:
            assert while_made == answer_bytes > 0
            assert link.scope.held[Resource.ANSWERS] == 0, "it is done with"


@simulated
async def test_one_signature_of_each_announcement_is_verified_although_it_has_one_for_protocol_1_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verified, verify = Counter[PeerId](), MemoryNetwork.verify

    def count(self: MemoryNetwork, peer: PeerId, message: bytes, signature: bytes) -> bool:
        verified[peer] += 1
        return verify(self, peer, message, signature)

    monkeypatch.setattr(MemoryNetwork, "verify", count)
    async with two_nodes(DIGESTS_ALWAYS) as (one, other):
        grown = [
            sign_grown(each.announcement, partial(_signature, each.announcement.peer))
            for each in (announced(number, 0) for number in range(40))
        ]
        tell(one, [announced(FULL, 0)])
        tell(other, grown)
        for _ in range(2):
            await exchange(one, other)
        assert len(one.view) == 41
        told = [each.announcement.peer for each in grown]
        assert verified == Counter([*told, announced(FULL, 0).announcement.peer])
