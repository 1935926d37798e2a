"""A server that says that numbers overflow is believed by the client's own numbers, or if all others say the same."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.operations import DeepPrompts
from llmnode.core.policy import RecoveryPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError, NumericOverflow, PeerError, PeerRefused, PeerUnreachable
from llmnode.session.failures import StepFailures
from llmnode.session.overflow import LARGEST, Given, OverflowClaims
from llmnode.wire.adapter import make_adapter
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import Callable

ONE, TWIN, OTHER, THIRD = (PeerId(name) for name in ("one of group a", "twin of group a", "other of b", "third of c"))
BLOCKS = Span(2, 4)
PATIENCE_S = RecoveryPolicy().overflow_patience_s
USUAL, ABSURD = struct.pack("<f", 100.0), struct.pack("<f", -2 * LARGEST)
ADAPTER = make_adapter(bytes(32), {0: (USUAL, 1)}, 100.0)
TOO_MUCH = {
    "an adapter": (Given(replace(ADAPTER, largest=1e30)), "adapter has numbers up to 1.0e"),
    "no numbers": (Given(replace(ADAPTER, largest=float("nan"))), "the adapter has numbers up to nan"),
    "prompts": (Given(ADAPTER, DeepPrompts(1, 1, 1, ABSURD)), "the prompts have numbers above"),
    "hidden states": (Given(ADAPTER, numbers=[USUAL, USUAL + ABSURD]), "the hidden states or gradients have numbers"),
}
SOUND = Given(ADAPTER, DeepPrompts(1, 1, 1, USUAL), [USUAL])


class Finder:
    """Takes the place of a finder. The last character of a name is the group."""

    def __init__(self) -> None:
        self.reported: list[PeerId | None] = []
        self.tries = 0

    def report(self, error: PeerError) -> None:
        self.reported.append(error.peer)

    def group_of(self, peer: PeerId) -> str:
        return peer[-1]

    def try_others(self) -> None:
        self.tries += 1


class Step:
    """One step or pass, and what its servers say."""

    def __init__(self, given: Given = SOUND, *, is_backward: bool = False) -> None:
        self.finder = Finder()
        self.as_finder: Any = self.finder  # Any: it takes the place of a PeerFinder
        self.failures = StepFailures(RecoveryPolicy(), OverflowClaims(given, is_backward))

    def fails(self, error: PeerError, now_s: float = 0.0) -> bool:
        """Whether the client believes then that its numbers overflow."""
        return self._is_believed(lambda: self.failures.note_uncomputed(error, self.as_finder, now_s))

    def says(self, peer: PeerId, now_s: float = 0.0, span: Span = BLOCKS) -> bool:
        return self.fails(PeerRefused(RefusalCode.OVERFLOW, "because", peer=peer, span=span), now_s)

    def nobody_else(self, now_s: float = 0.0) -> bool:
        """Whether the client believes it when there is no other server to ask."""
        return self._is_believed(lambda: self.failures.check_agreement(now_s))

    def _is_believed(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except NumericOverflow:
            assert ONE not in self.finder.reported, "no server is at fault"
            return True
        return False


@pytest.mark.parametrize("code", [RefusalCode.OVERFLOW, RefusalCode.COMPUTE_FAILED])
@pytest.mark.parametrize("what", TOO_MUCH)
def test_one_server_is_believed_if_the_clients_own_numbers_are_absurd(what: str, code: RefusalCode) -> None:
    given, words = TOO_MUCH[what]
    step, error = Step(given), PeerRefused(code, "because", peer=ONE, span=BLOCKS)
    with pytest.raises(ConfigError, match=rf"blocks \[2, 4\).*{words}.*smaller learning rate") as caught:
        step.failures.note_uncomputed(error, step.as_finder, 0.0)
    assert isinstance(caught.value, NumericOverflow)
    assert caught.value.__cause__ is error
    assert not step.finder.reported


@pytest.mark.parametrize("what", TOO_MUCH)
def test_absurd_numbers_are_no_excuse_for_other_failures(what: str) -> None:
    step = Step(TOO_MUCH[what][0])
    for error in (PeerUnreachable("gone", peer=ONE), PeerRefused(RefusalCode.CONFLICT, "because", peer=TWIN)):
        assert not step.fails(error)
    assert step.finder.reported == [ONE, TWIN]


def test_a_backward_takes_a_failed_computation_for_nothing_else() -> None:
    step = Step(TOO_MUCH["an adapter"][0], is_backward=True)
    assert not step.fails(PeerRefused(RefusalCode.COMPUTE_FAILED, "no memory", peer=TWIN))
    assert step.says(ONE)


def test_the_codec_is_named_if_it_may_be_the_cause() -> None:
    for codec in Codec:
        error = Given(codec=codec).error(BLOCKS, "because")
        assert ("raw and bf16 carry more" in str(error)) == (codec is Codec.FP16)


def test_servers_of_one_group_are_believed_after_a_time_in_which_nobody_else_came() -> None:
    step = Step()
    for at_s in (0.0, 1.0, PATIENCE_S - 0.1):
        for peer in (ONE, TWIN):
            assert not step.says(peer, 100 + at_s)
        assert not step.nobody_else(100 + at_s)
    assert not step.says(TWIN, 100 + PATIENCE_S), "others are asked first"
    assert step.nobody_else(100 + PATIENCE_S)


def test_servers_of_two_groups_are_believed_when_nobody_else_can_be_asked() -> None:
    step = Step()
    assert not step.says(ONE)
    assert not step.says(OTHER), "there may be an honest one among the rest"
    assert step.nobody_else()


def test_they_are_not_believed_while_a_server_that_failed_in_another_way_may_come_back() -> None:
    step = Step()
    assert not step.fails(PeerUnreachable("gone", peer=THIRD))
    for peer in (ONE, OTHER):
        assert not step.says(peer)
    assert not step.nobody_else(10 * PATIENCE_S)
    assert not step.says(THIRD)
    assert step.nobody_else(), "it has come back, and says the same"


def test_the_latest_word_of_a_server_counts() -> None:
    step = Step()
    for peer in (ONE, OTHER):
        assert not step.says(peer)
    assert not step.fails(PeerUnreachable("gone", peer=OTHER))
    assert not step.nobody_else(10 * PATIENCE_S)


def test_servers_of_other_blocks_do_not_agree() -> None:
    """The second has got what the first one's twin computed: so the first was wrong."""
    step = Step()
    assert not step.says(ONE, span=Span(0, 2))
    assert not step.says(OTHER, span=Span(2, 4))
    assert not step.nobody_else()
    assert not step.says(THIRD, span=Span(3, 6))
    assert step.nobody_else()


def test_a_server_is_reported_once_somebody_has_computed_the_step_and_not_before() -> None:
    step = Step()
    assert not step.says(ONE)
    assert not step.fails(PeerUnreachable("gone", peer=OTHER))
    assert step.finder.reported == [OTHER]
    step.failures.got_through(step.as_finder)
    assert step.finder.reported == [OTHER, ONE]


def test_other_servers_are_tried_beside_when_a_hop_of_a_session_says_so() -> None:
    step = Step()
    lost = PeerRefused(RefusalCode.OVERFLOW, "because", peer=ONE, span=BLOCKS)
    step.failures.note_lost(lost, step.as_finder, 0.0)
    assert (step.finder.tries, step.finder.reported) == (1, [])
    assert step.failures.avoided(hurry=True) == {ONE}


@pytest.mark.parametrize("others_failed", [False, True])
def test_a_backward_waits_for_nobody(others_failed: bool) -> None:
    """Its gradients are NaNs, and training goes on."""
    step = Step(is_backward=True)
    if others_failed:
        assert not step.fails(PeerUnreachable("gone", peer=THIRD))
    assert not step.says(ONE)
    assert not step.says(TWIN), "one stranger may have both"
    assert step.nobody_else()
    assert step.says(OTHER), "two groups are enough"
