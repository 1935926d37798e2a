"""One thread for small models, and the same Hypothesis examples in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

settings.register_profile(
    "reference", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(autouse=True, scope="package")
def blueprints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where those of the small models are kept, their quantized blocks and their digests: apart from the user's."""
    folder = tmp_path_factory.mktemp("blueprints")
    with (
        patch("llmnode.models.blueprint.cache_folder", folder.joinpath),
        patch("llmnode.models.weights.quantized_cache.cache_folder", folder.joinpath),
        patch("llmnode.models.sources.file_digests.cache_folder", folder.joinpath),
    ):
        yield folder


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The matrices are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
