"""A prediction is compared with what it predicts: the rate of the load that there is, and the memory that is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.server_figures import ServerFigures, server_figures
from llmnode.core.speed import LEAST_FORWARDS, PROMPT_POSITIONS, ComputeSpeed, ForwardsSeen

BLOCKS = 5
PREDICTED = ComputeSpeed(10.0, 40.0, 100.0, 8)
"""A forward of one decode takes 0.1 s, and one of eight takes 0.2 s."""


@pytest.mark.parametrize(("sessions", "forward_s"), [(1.0, 0.1), (8.0, 0.2), (4.5, 0.15), (15.0, 0.3)])
def test_a_server_that_does_as_predicted_is_off_by_nothing_under_any_load(sessions: float, forward_s: float) -> None:
    assert PREDICTED.of_sessions(sessions) == pytest.approx(sessions / forward_s)
    forwards = ForwardsSeen(LEAST_FORWARDS, at_once=sessions, forward_s=forward_s / BLOCKS)
    figures = server_figures(PREDICTED, forwards, BLOCKS, 0, 0)
    assert (figures.sessions, figures.measured_tokens_per_s) == pytest.approx((sessions, sessions / forward_s))
    assert figures.speed_error == pytest.approx(0.0)
    slower = ForwardsSeen(LEAST_FORWARDS, at_once=sessions, forward_s=2 * forward_s / BLOCKS)
    assert server_figures(PREDICTED, slower, BLOCKS, 0, 0).speed_error == pytest.approx(1.0)


def test_a_server_without_sessions_has_measured_no_rate_and_tells_that_of_many() -> None:
    few = ForwardsSeen(LEAST_FORWARDS - 1, at_once=1.0, forward_s=0.1 / BLOCKS)
    figures = server_figures(PREDICTED, few, BLOCKS, 900, 1000)
    assert figures == ServerFigures(8.0, pytest.approx(40.0), 0.0, 900, 1000, 100.0, 0.0)
    assert figures.speed_error is None
    assert figures.memory_error == pytest.approx(-0.1)
    assert server_figures(ComputeSpeed(), ForwardsSeen(), BLOCKS, 0, 1000).memory_error is None


def test_prompts_are_compared_too_once_there_were_enough_forwards() -> None:
    prompt_s = PROMPT_POSITIONS / PREDICTED.prefill_tokens_per_s
    position_s = (prompt_s - 0.1) / PROMPT_POSITIONS
    forwards = ForwardsSeen(LEAST_FORWARDS, 0.1 / BLOCKS, position_s / BLOCKS, 1.0, 0.1 / BLOCKS)
    figures = server_figures(PREDICTED, forwards, BLOCKS, 0, 0)
    assert figures.predicted_prefill_tokens_per_s == 100.0
    assert figures.measured_prefill_tokens_per_s == pytest.approx(100.0)
    assert figures.prefill_error == pytest.approx(0.0)
    for few in (replace(forwards, decodes=LEAST_FORWARDS - 1), replace(forwards, prefill_s=0.0)):
        assert server_figures(PREDICTED, few, BLOCKS, 0, 0).prefill_error is None


def test_a_rate_that_was_not_measured_for_several_is_that_of_one_after_the_other() -> None:
    assert ComputeSpeed(10.0, 10.0, 10.0).of_sessions(4.0) == pytest.approx(10.0)
    assert ComputeSpeed().of_sessions(4.0) == 0.0


@given(st.floats(0.01, 1e6), st.floats(1.0, 8.0), st.floats(1.0, 1e4))
def test_more_sessions_are_never_predicted_to_get_less_together(one: float, gain: float, sessions: float) -> None:
    speed = ComputeSpeed(one, one * gain, one, 8)
    assert one * (1 - 1e-9) <= speed.of_sessions(sessions) <= one * sessions * (1 + 1e-9)
