"""Errors: which peer is to blame, and which of several is raised."""

from __future__ import annotations

import pytest

from llmnode import errors
from llmnode.core.ids import PeerId
from llmnode.core.span import Span
from llmnode.errors import (
    ConfigError,
    LlmnodeError,
    LocalProtocolError,
    ModelError,
    NoRoute,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    RemoteProtocolError,
    SessionLost,
    SwarmError,
    single_error,
)

PEER = PeerId("12D3KooPeer")
OTHER = PeerId("12D3KooOther")


def test_every_error_is_an_llmnode_error() -> None:
    found = [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)]
    assert all(issubclass(thing, LlmnodeError) for thing in found)


@pytest.mark.parametrize("kind", [ConfigError, ModelError, LocalProtocolError, SwarmError, NoRoute, SessionLost])
def test_what_is_no_peers_fault_is_not_retried_on_another_peer(kind: type[LlmnodeError]) -> None:
    assert not issubclass(kind, PeerError)


@pytest.mark.parametrize("kind", [PeerError, PeerUnreachable, PeerTimeout, RemoteProtocolError])
def test_a_peer_error_says_which_peer_and_which_blocks_as_far_as_it_is_known(kind: type[PeerError]) -> None:
    assert str(kind("is gone")) == "a peer: is gone"
    assert str(kind("is gone", peer=PEER)) == "peer 12D3KooPeer: is gone"
    assert str(kind("is gone", peer=PEER, span=Span(0, 10))) == "peer 12D3KooPeer (blocks [0, 10)): is gone"


def test_blame_names_the_culprit_of_an_error_that_knew_only_bytes() -> None:
    error = RemoteProtocolError("sent nonsense")
    assert error.blame(PEER, Span(3, 5)) is error
    assert (error.peer, error.span) == (PEER, Span(3, 5))


def test_blame_never_moves_from_one_peer_to_another() -> None:
    error = RemoteProtocolError("sent nonsense", peer=PEER).blame(OTHER, Span(3, 5)).blame(OTHER, Span(0, 1))
    assert (error.peer, error.span) == (PEER, Span(3, 5))


def test_a_refusal_says_its_code() -> None:
    error = PeerRefused("no-room", "KV is full", retry_after_s=2.5, peer=PEER)
    assert (error.code, error.reason, error.retry_after_s) == ("no-room", "KV is full", 2.5)
    assert str(error) == "peer 12D3KooPeer: refused (no-room): KV is full"


def test_no_route_names_every_missing_span_and_what_to_do() -> None:
    error = NoRoute([Span(0, 2), Span(7, 9)])
    assert error.missing == (Span(0, 2), Span(7, 9))
    assert str(error).startswith("no peer holds blocks [0, 2), [7, 9); start a server")


def test_a_lost_session_names_every_cause_oldest_first() -> None:
    causes = [PeerTimeout("too slow", peer=PEER), PeerUnreachable("is gone", peer=OTHER)]
    error = SessionLost(causes)
    assert error.causes == tuple(causes)
    assert str(error) == "session lost: peer 12D3KooPeer: too slow; peer 12D3KooOther: is gone"


def test_a_lost_session_says_each_cause_once_however_often_it_came() -> None:
    gone, late = PeerUnreachable("is gone", peer=PEER), PeerTimeout("too slow", peer=OTHER)
    assert str(SessionLost([gone, gone, late, gone])) == (
        "session lost: peer 12D3KooPeer: is gone (3 times); peer 12D3KooOther: too slow"
    )


def test_a_session_that_many_peers_have_lost_names_the_last_ones() -> None:
    causes = [PeerUnreachable(f"fault {number}") for number in range(30)]
    named = "; ".join(map(str, causes[-SessionLost.NAMED_CAUSES :]))
    assert str(SessionLost(causes)) == f"session lost: after 26 other failures, {named}"
    assert str(SessionLost(causes[:5])).startswith("session lost: after 1 other failure, a peer: fault 1;")


def test_of_a_group_of_one_its_error_is_raised() -> None:
    error = PeerTimeout("too slow")
    with pytest.raises(PeerTimeout) as caught, single_error():
        raise BaseExceptionGroup("nursery", [BaseExceptionGroup("inner nursery", [error])])
    assert caught.value is error


def test_of_several_errors_of_ours_the_first_is_raised() -> None:
    first, second = PeerTimeout("too slow"), SwarmError("so nothing works")
    with pytest.raises(PeerTimeout) as caught, single_error():
        raise BaseExceptionGroup("nursery", [BaseExceptionGroup("inner nursery", [first]), second])
    assert caught.value is first


@pytest.mark.parametrize("strange", [KeyboardInterrupt(), SystemExit(3), TypeError("a bug")], ids=repr)
def test_what_is_no_error_of_ours_comes_before_a_failed_peer(strange: BaseException) -> None:
    with pytest.raises(type(strange)) as caught, single_error():
        raise BaseExceptionGroup("nursery", [PeerTimeout("too slow"), BaseExceptionGroup("inner nursery", [strange])])
    assert caught.value is strange


def test_several_bugs_at_once_are_all_shown() -> None:
    group = BaseExceptionGroup("nursery", [PeerTimeout("too slow"), TypeError("a bug"), KeyError("another")])
    with pytest.raises(BaseExceptionGroup) as caught, single_error():
        raise group
    assert caught.value is group


@pytest.mark.parametrize("error", [PeerTimeout("too slow"), TypeError("a bug"), KeyboardInterrupt()], ids=repr)
def test_an_error_that_is_in_no_group_passes_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, single_error():
        raise error
    assert caught.value is error


def test_without_an_error_nothing_is_raised() -> None:
    with single_error():
        pass
