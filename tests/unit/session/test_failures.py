"""After failures, a step asks some peers again and others not."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.policy import RecoveryPolicy, RoutePolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerRefused, PeerTimeout, PeerUnreachable, SessionLost
from llmnode.session.failures import FAILED_COMPUTATIONS, QUICK_S, LetGo, StepFailures, wants_kv
from llmnode.wire.messages import RefusalCode

SILENT, FULL, HONEST = PeerId("silent"), PeerId("full"), PeerId("honest")
LIARS = [PeerId(f"liar {number} of group {number // 2}") for number in range(4)]
POLICY = RecoveryPolicy()


class Reports:
    """Takes the place of a finder: a step tells it of each failure. The last character of a name is the group."""

    def report(self, _error: PeerError) -> None: ...

    def group_of(self, peer: PeerId) -> str:
        return peer[-1]


def refused(failures: StepFailures, peer: PeerId, code: RefusalCode = RefusalCode.CONFLICT) -> None:
    failures.note(PeerRefused(code, "because", peer=peer), Reports())  # type: ignore[arg-type]


def is_agreed(failures: StepFailures) -> bool:
    try:
        failures.check_agreement(0.0)
    except SessionLost:
        return True
    return False


def test_a_peer_that_was_silent_is_asked_again_after_all_others() -> None:
    failures, finder = StepFailures(), Reports()
    failures.note(PeerTimeout("no RESULT", peer=SILENT), finder)  # type: ignore[arg-type]
    for _ in range(3):
        failures.note(PeerRefused("no-room", "full", peer=FULL), finder)  # type: ignore[arg-type]
        assert failures.avoided(hurry=True) == {SILENT, FULL}
        failures.ask_all_again()
        assert failures.avoided(hurry=True) == {SILENT}
    failures.ask_all_again()
    assert not failures.avoided(hurry=True), "there is nobody else"


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_peers_of_one_group_do_not_end_a_session_however_often_they_blame_it(rounds: int) -> None:
    failures = StepFailures()
    for _ in range(rounds):
        for peer in LIARS[:2]:
            refused(failures, peer)
            assert not is_agreed(failures)
        failures.ask_all_again()


def test_peers_of_several_groups_end_a_session_that_they_blame() -> None:
    failures = StepFailures()
    refused(failures, LIARS[0])
    failures.ask_all_again()
    refused(failures, LIARS[2])
    assert is_agreed(failures)


@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_peers_that_blame_a_session_do_not_end_it_while_another_one_may_come_back(rounds: int) -> None:
    failures = StepFailures()
    failures.note_lost(PeerUnreachable("gone", peer=HONEST), Reports(), 0.0)  # type: ignore[arg-type]
    for _ in range(rounds):
        for peer in LIARS:
            refused(failures, peer)
        assert not is_agreed(failures)
        failures.ask_all_again()
    refused(failures, HONEST)
    assert is_agreed(failures), "it has come back, and says the same"


def test_a_peer_blames_a_step_that_it_fails_to_compute_often() -> None:
    failures = StepFailures()
    for _ in range(FAILED_COMPUTATIONS + 1):
        assert not is_agreed(failures)
        for peer in (LIARS[0], LIARS[2]):
            refused(failures, peer, RefusalCode.COMPUTE_FAILED)
        failures.ask_all_again()
    assert is_agreed(failures)


def test_the_time_of_replays_is_none_of_the_search_except_of_many_that_fail() -> None:
    failures = StepFailures(POLICY)
    failures.begin_search(100.0)
    assert failures.deadline_s == 100 + POLICY.timeout_s
    failures.add_try(50.0, failed=False)
    for number in range(1, 10):
        failures.add_try(10.0, failed=True)
        assert failures.deadline_s == 150 + POLICY.timeout_s + 10 * min(number, POLICY.failed_tries)
    failures.begin_search(300.0)
    failures.add_try(10.0, failed=True)
    assert failures.deadline_s == 300 + POLICY.timeout_s


def test_replays_that_fail_at_once_are_not_counted_and_give_no_time() -> None:
    failures = StepFailures(POLICY)
    failures.begin_search(0.0)
    for _ in range(20):
        failures.add_try(QUICK_S / 2, failed=True)
    assert failures.deadline_s == POLICY.timeout_s
    failures.add_try(60.0, failed=True)
    assert failures.deadline_s == 60 + POLICY.timeout_s


def test_a_step_replaces_a_limited_number_of_hops_before_it_gets_on() -> None:
    failures = StepFailures(POLICY)
    for _ in range(POLICY.replacements):
        failures.begin_search(5.0)
        assert failures.deadline_s > 5.0
    failures.begin_search(5.0)
    failures.add_try(100.0, failed=False)
    assert failures.deadline_s < 5.0


def test_the_pauses_for_want_of_kv_grow_and_clients_come_apart() -> None:
    route, rng = RoutePolicy(), random.Random(0)
    failures = StepFailures(POLICY)
    assert failures.pause_s(route, rng) == route.retry_s
    pauses_s = []
    for _ in range(4):
        error = PeerRefused(RefusalCode.NO_ROOM, "full", retry_after_s=60.0, peer=LIARS[0])
        failures.note(error, Reports())  # type: ignore[arg-type]
        pauses_s.append(failures.pause_s(route, rng) / route.longest_pause_s)
        failures.ask_all_again()
        assert failures.pause_s(route, rng) == route.retry_s
    for pause_s, times in zip(pauses_s, (1, 2, 4, 4), strict=True):
        assert times < pause_s < 1.5 * times
    assert pauses_s[2] != pauses_s[3]


@pytest.mark.parametrize(
    ("failure", "is_for_kv"),
    [
        (PeerRefused(RefusalCode.NO_ROOM, "full", retry_after_s=1.0), True),
        (PeerRefused(RefusalCode.UNKNOWN_SESSION, "moved", retry_after_s=1.0), True),
        (PeerRefused(RefusalCode.UNKNOWN_SESSION, "idle"), False),
        (PeerRefused(RefusalCode.NO_ROOM, "too long"), False),
        (PeerRefused(RefusalCode.BUSY, "no memory", retry_after_s=1.0), False),
        (LetGo(Hop(LIARS[0], Span(0, 1))), True),
        (PeerUnreachable("gone"), False),
    ],
)
def test_a_session_waits_for_kv_if_a_peer_may_have_some_later(failure: PeerError, is_for_kv: bool) -> None:
    assert wants_kv(failure) == is_for_kv


def test_kv_that_was_let_go_is_nobodys_failure() -> None:
    failures = StepFailures(POLICY)
    failures.note_lost(LetGo(Hop(LIARS[0], Span(0, 1))), Reports(), 0.0)  # type: ignore[arg-type]
    assert not failures.failed and not failures.causes and not failures.verdicts
