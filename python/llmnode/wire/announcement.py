"""Announcements as bytes: what is signed, and the payloads of VIEW and NEWS frames.

A VIEW payload is a msgpack map of peer ids to sequence numbers. A NEWS payload is a msgpack array of two: the
announcements, each an array of body and signature, and the ids of peers of whom the sender would like to hear.
Knows no key: `llmnode.ports.Network` signs and verifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.ids import PeerId
from llmnode.core.span import Span
from llmnode.errors import RemoteProtocolError
from llmnode.wire.messages import AnnouncementBody, pack, unpack_signed
from llmnode.wire.profile import profile_fields, profile_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmnode.core.policy import SwarmPolicy
    from llmnode.wire.frame import Buffer

SIGNING_CONTEXT = b"llmnode-announcement-1:"
"""Before the body, under the signature: a key that signs other things must not sign these by accident."""

_PEER_ID_CHARACTERS = 100
_SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class News:
    """The content of a NEWS frame. Nothing in it is verified yet."""

    announcements: Sequence[SignedAnnouncement]
    wanted: Sequence[PeerId]
    unread: tuple[RemoteProtocolError, ...] = ()
    """Why announcements were skipped, one error each: this version cannot read their bodies."""


def pack_announcement(announcement: Announcement) -> bytes:
    """The body: what is signed, after SIGNING_CONTEXT."""
    offer = announcement.offer
    return pack(
        AnnouncementBody(
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
        )
    )


def unpack_announcement(body: Buffer, signature: Buffer) -> SignedAnnouncement:
    """Read what a peer says another has signed. Raises RemoteProtocolError; the signature is not checked here.

    Fields that this version does not know are ignored, and stay in `body`: the bytes that were signed are passed on.
    """
    fields = unpack_signed(AnnouncementBody, body)
    if not fields.span_start < fields.span_end <= fields.blocks:
        raise RemoteProtocolError("AnnouncementBody: announces a span that its model does not have")
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
    )
    announcement = Announcement(
        PeerId(fields.peer), tuple(fields.addresses), fields.sequence, fields.expires_ms, fields.software, offer
    )
    return SignedAnnouncement(announcement, bytes(body), bytes(signature))


def pack_sequences(sequences: Mapping[PeerId, int]) -> bytes:
    packed = msgpack.packb(dict(sequences))
    assert isinstance(packed, bytes)
    return packed


def unpack_sequences(payload: Buffer, policy: SwarmPolicy) -> dict[PeerId, int]:
    """Raises RemoteProtocolError."""
    values = _unpack(payload, policy, "VIEW")
    if not isinstance(values, dict) or not all(
        _is_peer_id(peer) and type(sequence) is int and sequence >= 0 for peer, sequence in values.items()
    ):
        raise RemoteProtocolError("VIEW: no map of peers and sequence numbers")
    return values


def pack_news(announcements: Iterable[SignedAnnouncement], wanted: Sequence[PeerId], policy: SwarmPolicy) -> bytes:
    """As many of `announcements` as one frame may hold; the rest is asked for again at the next exchange."""
    packed, size = [], 0
    for signed in announcements:
        size += len(signed.body) + len(signed.signature) + 16
        if size > policy.exchange_bytes // 2:
            break
        packed.append((signed.body, signed.signature))
    news = msgpack.packb((packed, list(wanted)))
    assert isinstance(news, bytes)
    return news


def unpack_news(payload: Buffer, policy: SwarmPolicy) -> News:
    """Raises RemoteProtocolError for anything but pairs of body and signature, within their limits.

    A body that cannot be read is skipped: it may be a newer node's, and the sender has only passed it on.
    """
    values = _unpack(payload, policy, "NEWS")
    if not isinstance(values, list) or len(values) != 2 or not all(isinstance(value, list) for value in values):
        raise RemoteProtocolError("NEWS: no pair of lists")
    pairs, wanted = values
    if not all(_is_peer_id(peer) for peer in wanted):
        raise RemoteProtocolError("NEWS: asks for what is no peer id")
    announcements, unread = [], []
    for body, signature in [_checked_pair(pair, policy) for pair in pairs]:
        try:
            announcements.append(unpack_announcement(body, signature))
        except RemoteProtocolError as error:
            unread.append(error)
    return News(announcements, wanted, tuple(unread))


def _checked_pair(pair: Any, policy: SwarmPolicy) -> tuple[bytes, bytes]:  # Any: what a peer sends is not known yet
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(part) is bytes for part in pair):
        raise RemoteProtocolError("NEWS: an announcement is no pair of body and signature")
    body, signature = pair
    if len(body) > policy.announcement_bytes or len(signature) != _SIGNATURE_BYTES:
        raise RemoteProtocolError("NEWS: an announcement of the wrong size")
    return body, signature


def _unpack(payload: Buffer, policy: SwarmPolicy, what: str) -> Any:  # Any: likewise
    if len(payload) > policy.exchange_bytes:
        raise RemoteProtocolError(f"{what}: {len(payload)} bytes, at most {policy.exchange_bytes} allowed")
    try:
        return msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_map_len=2 * policy.view_peers,
            max_array_len=2 * policy.view_peers,
            max_bin_len=policy.announcement_bytes,
            max_str_len=_PEER_ID_CHARACTERS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:  # msgpack documents both
        raise RemoteProtocolError(f"{what}: not msgpack ({str(error) or type(error).__name__})") from error


def _is_peer_id(value: object) -> bool:
    return type(value) is str and 1 <= len(value) <= _PEER_ID_CHARACTERS
