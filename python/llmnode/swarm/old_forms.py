"""Announcements as peers of protocol 1 can read them. To be deleted when there are no such peers any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.wire import version_1
from llmnode.wire.announcement import form_in_version_1, is_form_signed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from llmnode.core.announcement import SignedAnnouncement, SignedBody
    from llmnode.core.ids import PeerId
    from llmnode.wire.receipt import Verify

MADE_AT_ONCE = 16
"""After this number of forms other tasks get their turn: to make and to verify one takes a quarter of a millisecond."""


@dataclass(frozen=True, slots=True)
class OldForm:
    """The form of an announcement of `peer`, with the sequence number that it has there."""

    peer: PeerId
    sequence: int
    signed: SignedBody


@dataclass(slots=True)
class _Made:
    of: SignedBody
    """The announcement, as its peer signed it."""
    form: OldForm | None
    """None if there is none, or if the peer has not signed it."""
    is_verified: bool


class OldForms:
    """They are made once for each announcement, and verified when a peer of protocol 1 lacks one."""

    def __init__(self, verify: Verify, most: int) -> None:
        """It keeps `most` of them, one of each peer."""
        self._verify = verify
        self._most = most
        self._made: dict[PeerId, _Made] = {}

    def __len__(self) -> int:
        return len(self._made)

    async def lacked(self, announcements: Iterable[SignedAnnouncement], theirs: Mapping[PeerId, int]) -> list[OldForm]:
        """The forms that a peer lacks which has `theirs`: the sequence numbers of the forms that it knows."""
        lacked = []
        for number, each in enumerate(announcements, 1):
            made = self._made_of(each)
            form = made.form
            if form is not None and form.sequence > theirs.get(form.peer, -1) and self._is_signed(made):
                lacked.append(form)
            if number % MADE_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return lacked

    def _made_of(self, announcement: SignedAnnouncement) -> _Made:
        peer, signed = announcement.announcement.peer, announcement.signed
        made = self._made.get(peer)
        if made is None or made.of != signed:
            self._made.pop(peer, None)
            if len(self._made) >= self._most:
                del self._made[next(iter(self._made))]  # the oldest
            old = form_in_version_1(announcement)
            form = None if old is None else OldForm(peer, version_1.sequence_of(announcement, old), old)
            made = self._made[peer] = _Made(signed, form, is_verified=old == signed)
        return made

    def _is_signed(self, made: _Made) -> bool:
        if not made.is_verified:
            made.is_verified = True
            if made.form is not None and not is_form_signed(made.form.peer, made.form.signed, self._verify):
                made.form = None
        return made.form is not None
