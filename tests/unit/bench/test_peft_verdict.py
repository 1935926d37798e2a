"""Benchmark peft-tests: which failures count as such. No refusal of ours, and no control, may hide another error."""

from __future__ import annotations

import pytest

from bench.peft_tests.verdict import FAILED, NOT_APPLICABLE, PASSED, SKIPPED, Ended, does_not_apply, verdict

WRONG = Ended(FAILED, "AssertionError", "assert False")
REFUSED = Ended(FAILED, "ConfigError", "block 0: self_attn.q_proj: servers compute LoRA alone, and this is IA3")
SHADOW = Ended(FAILED, "AttributeError", "Unable to automatically find a `nn.ModuleList` of decoder layers")


@pytest.mark.parametrize("ended", [REFUSED, SHADOW])
def test_what_servers_do_not_compute_does_not_apply(ended: Ended) -> None:
    found = verdict(ended, None)
    assert found["outcome"] == NOT_APPLICABLE
    assert "with the servers" in found["reason"]


@pytest.mark.parametrize("error", ["SessionLost", "AssertionError", "RuntimeError"])
def test_the_words_of_a_refusal_in_another_error_are_a_failure(error: str) -> None:
    ended = Ended(FAILED, error, REFUSED.said)
    assert does_not_apply(ended) is None
    assert verdict(ended, Ended(PASSED)) == {"outcome": FAILED, "reason": f"{error}: {REFUSED.said}"}


def test_a_failure_counts_unless_the_whole_model_fails_too() -> None:
    assert verdict(WRONG, None)["outcome"] == FAILED
    assert verdict(WRONG, Ended(PASSED))["outcome"] == FAILED
    assert verdict(WRONG, Ended(SKIPPED))["outcome"] == FAILED
    over_whole = Ended(FAILED, "ValueError", "its model has another layer\nand more")
    assert verdict(WRONG, over_whole) == {
        "outcome": NOT_APPLICABLE,
        "reason": "it fails over the whole model in one process, too: ValueError: its model has another layer",
    }


def test_other_outcomes_stay_as_they_are() -> None:
    assert verdict(Ended(PASSED), None) == {"outcome": PASSED, "reason": ""}
    assert verdict(Ended(SKIPPED, "Skipped", "no bias"), None) == {"outcome": SKIPPED, "reason": "no bias"}
