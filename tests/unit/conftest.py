"""Hypothesis for all unit tests: the same examples in every run, and no judgement about a busy machine's speed.

And a worker without torch, for tests of what is around it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from llmnode.core.span import Span
from llmnode.testing import ExactWorker

settings.register_profile(
    "unit", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture
def exact_worker() -> ExactWorker:
    """Four blocks, for hidden states of 8 bytes a position, with KV for 64."""
    return ExactWorker(Span(0, 4), row_bytes=8, kv_tokens=64)
