"""One thread for small models, and the same Hypothesis examples in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

settings.register_profile(
    "reference", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The matrices are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
