"""The values of `llmnode plan`: a node behind a relay has the way through it in its forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmnode.core.forecast import ClientPlace
from llmnode.core.model import ModelInfo
from llmnode.core.span import Span
from llmnode.core.speed import ComputeSpeed, NetworkSpeed
from llmnode.node.plan import NEAR_S, OwnNode, Plan, as_json

MODEL = ModelInfo("m", bytes(32), 4, hidden_size=64, context_tokens=4096)
NODE = OwnNode(Span(0, 4), ComputeSpeed(100.0, 200.0, 400.0), NetworkSpeed(1e6, {}), 1, 4096, 1)


def test_each_step_goes_to_the_relay_and_back() -> None:
    direct = Plan(MODEL, [], NODE, ClientPlace({}), 16)
    relayed = replace(direct, node=replace(NODE, relay_s=0.05))
    near, far = direct.with_it.session, relayed.with_it.session
    assert near is not None and far is not None
    assert far.step_s - near.step_s == pytest.approx(2 * 0.05 - NEAR_S)
    assert relayed.with_it.tokens_per_s < direct.with_it.tokens_per_s
    assert relayed.with_another.tokens_per_s < direct.with_another.tokens_per_s
    assert as_json(relayed)["node"]["relay_round_trip_us"] == 50_000
    assert as_json(direct)["node"]["relay_round_trip_us"] is None
