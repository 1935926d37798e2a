"""A move that failed speaks against some of its newcomers, and not against the others."""

from __future__ import annotations

import pytest

from llmnode.core.ids import PeerId
from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout, PeerUnreachable, RemoteProtocolError
from llmnode.session.moving import at_fault
from llmnode.wire.messages import RefusalCode

BEFORE, FIRST, SECOND = PeerId("before"), PeerId("first"), PeerId("second")
BOTH = [FIRST, SECOND]


def test_a_move_that_takes_too_long_speaks_against_all_newcomers() -> None:
    assert at_fault(None, BOTH) == BOTH


@pytest.mark.parametrize(
    "failure",
    [
        PeerTimeout("no RESULT in 60 s", peer=SECOND),
        PeerRefused(RefusalCode.NO_ROOM, "no KV is left", peer=SECOND),
        IntegrityError("sends other hidden states than before", peer=SECOND),
        IntegrityError("contradict each other", suspects=(SECOND, PeerId("after"))),
        IntegrityError("contradict each other", suspects=(BEFORE, SECOND)),
    ],
    ids=str,
)
def test_the_failure_of_a_newcomer_speaks_against_that_one(failure: PeerError) -> None:
    assert at_fault(failure, BOTH) == [SECOND]


@pytest.mark.parametrize(
    "failure",
    [
        PeerRefused(RefusalCode.BUSY, "no memory is left", peer=BEFORE),
        PeerRefused(RefusalCode.UNKNOWN_SESSION, "no such session is open", peer=BEFORE),
        PeerUnreachable("connection closed", peer=BEFORE),
        RemoteProtocolError("answered for other positions than it was asked for", peer=BEFORE),
        IntegrityError("sends other hidden states than before", peer=BEFORE),
    ],
    ids=str,
)
def test_newcomers_have_no_part_in_what_the_hop_before_them_does(failure: PeerError) -> None:
    assert not at_fault(failure, BOTH)


def test_a_hop_that_does_not_answer_in_time_may_have_waited_for_the_newcomers() -> None:
    assert at_fault(PeerTimeout("no REPLAYED in 60 s", peer=BEFORE), BOTH) == BOTH
