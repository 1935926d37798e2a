"""A session outlives whatever befalls its servers, by a plan of faults that the seed decides.

The arithmetic is exact, so every answer is right to the bit or the KV of some peer is not what it should be. A seed
that fails says how it is run again, and what befell it; LLMNODE_SEEDS=5000 tries many.
"""

from __future__ import annotations

import pytest

from llmnode.testing import seeds
from simulation.chaos import outlive
from simulation.world import simulated


@pytest.mark.parametrize("seed", seeds(170), ids=lambda seed: f"seed-{seed}-")
@simulated
async def test_a_session_outlives_whatever_befalls_its_servers(seed: int) -> None:
    await outlive(seed)
