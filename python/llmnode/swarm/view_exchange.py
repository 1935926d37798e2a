"""The questions and answers by which two nodes exchange views. Believes nothing: `membership.py` does.

A node with a small view sends its sequence numbers (VIEW), and the peer answers with what is newer. A node with a large
one sends digests of its view first, and the peer lists its entries where they differ (`core/view_digests.py`). Then the
node asks for what it misses (MISSING). Peers that do not know digests are sent sequence numbers, however many.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.core.view_digests import SALT_BYTES, compare, differing, digests_of, in_buckets
from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.wire import version_1
from llmnode.wire.announcement import (
    News,
    pack_news,
    pack_sequences,
    unpack_news,
    unpack_sequences,
)
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, RefusalCode, pack, unpack
from llmnode.wire.view_digests import (
    ASKED_AT_ONCE,
    pack_differing,
    pack_digests,
    pack_missing,
    unpack_differing,
    unpack_digests,
    unpack_missing,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence

    from llmnode.core.announcement import SignedAnnouncement, SignedBody
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import SwarmPolicy
    from llmnode.core.view import View
    from llmnode.swarm.old_forms import OldForms
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.frame import Buffer

    Believe = Callable[[News], Awaitable[None]]

T = TypeVar("T")

READ_AT_ONCE = 16
"""After this number of announcements other tasks get their turn: each takes up to a quarter of a millisecond to read
and to verify."""
NOTHING: Mapping[PeerId, int] = MappingProxyType({})
"""The sequence numbers of a peer that has no announcements."""

QUESTIONS = frozenset({FrameType.VIEW, FrameType.DIGESTS, FrameType.MISSING})
"""Every node answers these."""


@dataclass(frozen=True, slots=True)
class Told:
    """The words of a peer, beside announcements."""

    ahead_ms: int
    """By how much its clock is ahead of ours."""
    wanted: Sequence[PeerId]
    """The peers whose announcements it lacks."""


@dataclass(frozen=True, slots=True)
class ViewExchange:
    """Both sides of exchanges, for one node's view."""

    view: View
    policy: SwarmPolicy
    now_ms: Callable[[], int]
    old_forms: OldForms
    """For peers of protocol 1."""

    async def ask(self, connection: PeerConnection, believe: Believe) -> Told:
        """`believe` gets the announcements, some at a time. It may raise RemoteProtocolError.

        Raises PeerError, also if not all answers have come within `exchange_timeout_s`: what came before was believed.
        """
        try:
            if len(self.view) >= self.policy.digest_peers and connection.knows_digests:
                try:
                    return await self._ask_by_digests(connection, believe)
                except PeerRefused as refusal:
                    if refusal.code != RefusalCode.UNKNOWN_FRAME:
                        raise
                    connection.knows_digests = False
            return await self._ask_by_sequences(connection, believe)
        except RemoteProtocolError as error:
            raise error.blame(connection.peer) from None

    async def _ask_by_sequences(self, connection: PeerConnection, believe: Believe) -> Told:
        if connection.version == version_1.VERSION:
            forms = await self.old_forms.lacked(self.view.newer_than({}), NOTHING)
            ours = {each.peer: each.sequence for each in forms}
        else:  # or the version is not known yet
            ours = self.view.sequences()
        packed = pack_sequences(ours)
        answer, ahead_ms = await self._ask(connection, FrameType.VIEW, packed, FrameType.NEWS, self._until_s())
        news = await with_pauses(unpack_news(answer.payload, self.policy))
        await believe(news)
        return Told(ahead_ms, news.wanted)

    async def _ask_by_digests(self, connection: PeerConnection, believe: Believe) -> Told:
        until_s, salt = self._until_s(), secrets.token_bytes(SALT_BYTES)
        digests = pack_digests(salt, digests_of(in_buckets(self.view.entries()), salt))
        answer, ahead_ms = await self._ask(connection, FrameType.DIGESTS, digests, FrameType.DIFFERING, until_s)
        numbers, theirs = unpack_differing(answer.payload, self.policy)
        await trio.lowlevel.checkpoint()  # to read and to compare thousands takes milliseconds each
        ours = {entry: peer for entry, peer in self.view.entries().items() if entry[0] in numbers}
        difference = compare(ours, theirs)
        for start in range(0, len(difference.missing), ASKED_AT_ONCE):
            missing = pack_missing(difference.missing[start : start + ASKED_AT_ONCE])
            answer, _ = await self._ask(connection, FrameType.MISSING, missing, FrameType.NEWS, until_s)
            began_s = trio.current_time()
            news = await with_pauses(unpack_news(answer.payload, self.policy))
            if len(news.pairs) > ASKED_AT_ONCE:
                raise RemoteProtocolError(f"{len(news.pairs)} announcements, and {ASKED_AT_ONCE} were asked for")
            await believe(news)
            until_s += trio.current_time() - began_s  # to read and to verify them is no delay of the peer's
        return Told(ahead_ms, [ours[entry] for entry in difference.newer])

    def _until_s(self) -> float:
        return trio.current_time() + self.policy.exchange_timeout_s

    async def _ask(
        self, connection: PeerConnection, kind: FrameType, payload: bytes, answer_type: FrameType, until_s: float
    ) -> tuple[Frame, int]:
        """The answer, and by how much the peer's clock is ahead."""
        asked_ms = self.now_ms()
        meta, patience_s = pack(Clock(asked_ms)), max(0.0, until_s - trio.current_time())
        answer = await connection.ask_peer(kind, answer_type, patience_s, meta, payload)
        return answer, unpack(Clock, answer.meta).now_ms - (asked_ms + self.now_ms()) // 2

    @property
    def most_answer_bytes(self) -> int:
        """An answer has at most this size."""
        return min(len(self.view) * self.policy.announcement_bytes, self.policy.exchange_bytes)

    async def answer(self, question: Frame, version: int | None) -> Frame:
        """The answer for a peer that speaks this version. Raises RemoteProtocolError."""
        meta = pack(Clock(self.now_ms()))
        if question.type is FrameType.DIGESTS:
            differences = self._differing(question.payload)
            return Frame(FrameType.DIFFERING, step=question.step, meta=meta, payload=differences)
        if question.type is FrameType.MISSING:
            news = await self._missing(question.payload, version)
        else:
            news = await self._newer(question.payload, version)
        return Frame(FrameType.NEWS, step=question.step, meta=meta, payload=news)

    async def _newer(self, payload: Buffer, version: int | None) -> bytes:
        """To find, to list and to pack thousands takes milliseconds each: other tasks have their turns between."""
        theirs = await with_pauses(unpack_sequences(payload, self.policy))
        lacked, is_large = self.view.lacks(theirs), len(self.view) >= self.policy.digest_peers
        if is_large:
            await trio.lowlevel.checkpoint()
        forms = await self.forms_for(version, self.view.newer_than(theirs), theirs)
        if is_large:
            await trio.lowlevel.checkpoint()
        return pack_news(forms, lacked, self.policy)

    def _differing(self, payload: Buffer) -> bytes:
        salt, theirs = unpack_digests(payload)
        ours = in_buckets(self.view.entries())
        return pack_differing(differing(digests_of(ours, salt), theirs), ours)

    async def _missing(self, payload: Buffer, version: int | None) -> bytes:
        peers = unpack_missing(payload)
        return pack_news(await self.forms_for(version, self.view.of_hashes(peers)), [], self.policy)

    async def forms_for(
        self, version: int | None, announcements: Iterable[SignedAnnouncement], theirs: Mapping[PeerId, int] = NOTHING
    ) -> list[SignedBody]:
        """Those of `announcements` that a peer of this version can read, without the older forms that it has."""
        if version != version_1.VERSION:
            return [each.signed for each in announcements]
        return [each.signed for each in await self.old_forms.lacked(announcements, theirs)]


async def with_pauses(parts: Generator[None, None, T]) -> T:
    """The result of work that is done in `parts`. Other tasks run between them."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
        await trio.lowlevel.checkpoint()
