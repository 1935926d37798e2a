"""Settings of all tests, and the embedded model as transformers loads it."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.kit.exact import Reference
    from llmnode.models.sources.folder import ModelFolder

gc.set_threshold(20_000, 20, 100)  # rarely: a tenth less CPU time

# A shell has what it starts in the background ignore Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is for the daily run alone."""
    if not os.environ.get("LLMNODE_SEEDS_TIMES"):
        for item in items:
            if item.get_closest_marker("daily"):
                item.add_marker(pytest.mark.skip(reason="for the daily run: LLMNODE_SEEDS_TIMES is not set"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The servers of tests leave no peers, speeds or forecasts with those of the user's own commands."""
    from process.own_cache import cache_of_models

    own = cache_of_models(tmp_path_factory.mktemp("cache"))
    with patch.dict(os.environ, {"LLMNODE_CACHE": str(own)}):
        yield


@pytest.fixture(scope="session")
def folder() -> ModelFolder:
    from llmnode.models.embedded import open_embedded  # which imports torch: few tests ask for it

    return open_embedded()


@pytest.fixture(scope="session")
def reference(folder: ModelFolder) -> Reference:
    import torch

    from bench.kit.exact import reference_of

    torch.set_num_threads(1)
    return reference_of(folder.path)


@pytest.fixture(scope="session")
def transformers_model(reference: Reference) -> Any:  # Any: as transformers types it
    """The whole model in this process, as transformers loads it."""
    return reference.model
