"""Announcements as bytes: what is signed, and the payloads of VIEW and NEWS frames.

A VIEW payload is a msgpack map of peer ids to sequence numbers. A NEWS payload is a msgpack array of two: the
announcements, each an array of body and signature, and the ids of peers whose announcements the sender lacks.
`llmnode.ports.Network` has the keys: it signs and verifies.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgpack

from llmnode.core.adapters import AnnouncedAdapter
from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement, SignedBody
from llmnode.core.ids import AdapterId, PeerId
from llmnode.core.span import Span
from llmnode.core.speed import AnnouncedSpeed
from llmnode.errors import RemoteProtocolError
from llmnode.wire import version_1
from llmnode.wire.adapter import MOST_PARTS as MOST_BLOCKS
from llmnode.wire.messages import AnnouncementBody, pack, unpack_signed
from llmnode.wire.packed_entries import ENTRIES_AT_ONCE, PackedEntries
from llmnode.wire.profile import profile_fields, profile_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from llmnode.core.policy import SwarmPolicy
    from llmnode.wire.frame import Buffer
    from llmnode.wire.receipt import Sign, Verify

SIGNING_CONTEXT = b"llmnode-announcement-1:"
"""It precedes the body under the signature: a key that signs other things must not sign these by accident."""

_PEER_ID_CHARACTERS = 100
_SIGNATURE_BYTES = 64
_NUMBER_BYTES = 9
"""The largest number of msgpack."""
_PACKED_BYTES = 16
"""A packed entry of a NEWS payload is at most this much larger than its parts."""
KEPT = 64
"""The number of announcements that are kept as they were read: several neighbours pass the same one on within seconds.
None is larger than `SwarmPolicy.announcement_bytes`."""


@dataclass(frozen=True, slots=True)
class News:
    """The content of a NEWS frame. Nothing in it is verified yet."""

    pairs: Sequence[tuple[bytes, bytes]]
    """The bodies and signatures of the announcements."""
    wanted: Sequence[PeerId]

    def read(self) -> Iterator[SignedAnnouncement | RemoteProtocolError]:
        """The announcements, one by one: each takes a twentieth of a millisecond, and there may be thousands.

        In place of a body that this version cannot read comes the reason: it may be a newer node's, and the sender has
        only passed it on.
        """
        for body, signature in self.pairs:
            try:
                yield _read_lately(body, signature)
            except RemoteProtocolError as error:
                yield error


def sign_announcement(announcement: Announcement, sign: Sign) -> SignedAnnouncement:
    """Pack and sign it, a second time for peers of protocol 1 if they could not read all of it."""
    fields = _fields_of(announcement)
    if version_1.announces_more(fields) and (old := version_1.announcement_body(fields)) is not None:
        fields = replace(fields, signature_1=sign(SIGNING_CONTEXT + old))
    body = pack(fields)
    return unpack_announcement(body, sign(SIGNING_CONTEXT + body))


def is_signed_by_peer(announcement: SignedAnnouncement, verify: Verify) -> bool:
    """Whether its peer signed it."""
    return is_form_signed(announcement.announcement.peer, announcement.signed, verify)


def is_form_signed(peer: PeerId, form: SignedBody, verify: Verify) -> bool:
    return verify(peer, SIGNING_CONTEXT + form.body, form.signature)


def form_in_version_1(announcement: SignedAnnouncement) -> SignedBody | None:
    """The form for peers of protocol 1, not verified: `signed` itself if they can read that, None if it has none."""
    signed = announcement.signed
    return version_1.form_of(*unpack_signed(AnnouncementBody, signed.body), signed)


def _fields_of(announcement: Announcement) -> AnnouncementBody:
    offer = announcement.offer
    return AnnouncementBody(
        peer=announcement.peer,
        addresses=list(announcement.addresses),
        sequence=announcement.sequence,
        expires_ms=announcement.expires_ms,
        software=announcement.software,
        model=offer.model,
        **profile_fields(offer.profile),
        blocks=offer.blocks,
        span_start=offer.span.start,
        span_end=offer.span.end,
        state=offer.state,
        block_us=offer.block_us,
        kv_tokens=offer.kv_tokens,
        kv_tokens_free=offer.kv_tokens_free,
        # A part that is not known is left out.
        tokens_per_1000_s=offer.speed.tokens_per_1000_s or None,
        prefill_ns=offer.speed.prefill_ns or None,
        upload_kb_per_s=offer.speed.upload_kb_per_s or None,
        round_trips_us=dict(offer.speed.round_trips_us) or None,
        next_start=None if offer.moves_to is None else offer.moves_to.start,
        next_end=None if offer.moves_to is None else offer.moves_to.end,
        adapters=[[each.name, bytes(each.digest), each.rank] for each in offer.adapters] or None,
        kv_page=None if offer.kv_page == 1 else offer.kv_page,
        load_percent=None if offer.load is None else round(100 * offer.load),
        stays=1 if offer.stays else None,
    )


def unpack_announcement(body: Buffer, signature: Buffer) -> SignedAnnouncement:
    """Read an announcement that a peer passes on. Raises RemoteProtocolError. `is_signed_by_peer` checks the signature.

    Fields that this version does not know are ignored, and stay in the body: the bytes that were signed are passed on.
    """
    fields, _ = unpack_signed(AnnouncementBody, body)
    if fields.blocks > MOST_BLOCKS:
        raise RemoteProtocolError(f"AnnouncementBody: {fields.blocks} blocks, and no model has more than {MOST_BLOCKS}")
    if not fields.span_start < fields.span_end <= fields.blocks:
        raise RemoteProtocolError("AnnouncementBody: announces a span that its model does not have")
    moves_to = None
    if fields.next_start is not None and fields.next_end is not None:
        if not fields.next_start < fields.next_end <= fields.blocks:
            raise RemoteProtocolError("AnnouncementBody: moves to a span that its model does not have")
        moves_to = Span(fields.next_start, fields.next_end)
    if any(not address.endswith(f"/p2p/{fields.peer}") for address in fields.addresses):
        raise RemoteProtocolError("AnnouncementBody.addresses: of another peer")
    offer = Offer(
        model=fields.model,
        profile=profile_of(fields),
        blocks=fields.blocks,
        span=Span(fields.span_start, fields.span_end),
        state=PeerState(fields.state),
        block_us=fields.block_us,
        kv_tokens=fields.kv_tokens,
        kv_tokens_free=fields.kv_tokens_free,
        speed=AnnouncedSpeed(
            fields.tokens_per_1000_s or 0,
            fields.prefill_ns or 0,
            fields.upload_kb_per_s or 0,
            tuple((PeerId(peer), us) for peer, us in (fields.round_trips_us or {}).items()),
        ),
        moves_to=moves_to,
        adapters=tuple(AnnouncedAdapter(name, AdapterId(digest), rank) for name, digest, rank in fields.adapters or []),
        kv_page=fields.kv_page or 1,
        load=None if fields.load_percent is None else fields.load_percent / 100,
        stays=fields.stays is not None,
    )
    announcement = Announcement(
        PeerId(fields.peer), tuple(fields.addresses), fields.sequence, fields.expires_ms, fields.software, offer
    )
    return SignedAnnouncement(announcement, SignedBody(bytes(body), bytes(signature)))


@lru_cache(maxsize=KEPT)
def _read_lately(body: bytes, signature: bytes) -> SignedAnnouncement:
    return unpack_announcement(body, signature)


def pack_sequences(sequences: Mapping[PeerId, int]) -> bytes:
    packed = msgpack.packb(dict(sequences))
    assert isinstance(packed, bytes)
    return packed


def unpack_sequences(payload: Buffer, policy: SwarmPolicy) -> Generator[None, None, dict[PeerId, int]]:
    """In parts, after each of which other tasks may have their turn. Raises RemoteProtocolError."""
    sequences: dict[PeerId, int] = {}
    with _reading(payload, policy, "VIEW"):
        entries = PackedEntries(payload, 2 * policy.view_peers, is_map=True)
        for number in range(entries.length):
            peer = entries.next(_PEER_ID_CHARACTERS + _PACKED_BYTES)
            sequence = entries.next(_NUMBER_BYTES)
            if type(peer) is not str or not 0 < len(peer) <= _PEER_ID_CHARACTERS:
                raise ValueError("a key is no peer id")
            if type(sequence) is not int or sequence < 0:
                raise ValueError("a value is no sequence number")
            sequences[PeerId(peer)] = sequence
            if (number + 1) % ENTRIES_AT_ONCE == 0:
                yield
        if entries.tell() != len(payload):
            raise ValueError("more than was to come")
    return sequences


def pack_news(announcements: Iterable[SignedBody], wanted: Sequence[PeerId], policy: SwarmPolicy) -> bytes:
    """The first of `announcements`, as far as one frame may hold them; peers ask for the rest at the next exchange."""
    packed, size = [], 0
    for signed in announcements:
        size += len(signed.body) + len(signed.signature) + 16
        if size > policy.exchange_bytes // 2:
            break
        packed.append((signed.body, signed.signature))
    news = msgpack.packb((packed, list(wanted)))
    assert isinstance(news, bytes)
    return news


def unpack_news(payload: Buffer, policy: SwarmPolicy) -> Generator[None, None, News]:
    """In parts, after each of which other tasks may have their turn.

    Raises RemoteProtocolError for anything but pairs of body and signature, within their limits. The bodies are not
    read yet.
    """
    pairs: list[tuple[bytes, bytes]] = []
    wanted: list[PeerId] = []
    most, most_bytes = 2 * policy.view_peers, policy.announcement_bytes + _SIGNATURE_BYTES + _PACKED_BYTES
    with _reading(payload, policy, "NEWS"):
        entries = PackedEntries(payload, 2)
        if entries.length != 2:
            raise ValueError("no pair of lists")
        for number in range(entries.begin_list(most)):
            pairs.append(_checked_pair(entries.next(most_bytes), policy))
            if (number + 1) % ENTRIES_AT_ONCE == 0:
                yield
        for number in range(entries.begin_list(most)):
            peer = entries.next(_PEER_ID_CHARACTERS + _PACKED_BYTES)
            if type(peer) is not str or not 0 < len(peer) <= _PEER_ID_CHARACTERS:
                raise ValueError("asks for what is no peer id")
            wanted.append(PeerId(peer))
            if (number + 1) % ENTRIES_AT_ONCE == 0:
                yield
        if entries.tell() != len(payload):
            raise ValueError("more than was to come")
    return News(pairs, wanted)


def _checked_pair(pair: Any, policy: SwarmPolicy) -> tuple[bytes, bytes]:  # Any: what a peer sends is not known yet
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(part) is bytes for part in pair):
        raise ValueError("an announcement is no pair of body and signature")
    body, signature = pair
    if len(body) > policy.announcement_bytes or len(signature) != _SIGNATURE_BYTES:
        raise ValueError("an announcement of the wrong size")
    return body, signature


@contextmanager
def _reading(payload: Buffer, policy: SwarmPolicy, what: str) -> Iterator[None]:
    """Errors of msgpack, and ValueErrors, are raised as RemoteProtocolError. So is a payload that is too large."""
    if len(payload) > policy.exchange_bytes:
        raise RemoteProtocolError(f"{what}: {len(payload)} bytes, at most {policy.exchange_bytes} allowed")
    try:
        yield
    except (ValueError, msgpack.UnpackException) as error:  # msgpack documents both
        raise RemoteProtocolError(f"{what}: {str(error) or type(error).__name__}") from error
