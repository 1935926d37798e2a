"""The peers of other implementations, built once. Skipped where they cannot be: see `tests/interop/README.md`."""

from __future__ import annotations

import pytest

from bench.transport.steered import go_peer, rust_peer
from llmnode.errors import ConfigError


@pytest.fixture(scope="session", params=["go", "rust"])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts one of each kind."""
    try:
        return go_peer(tmp_path_factory.mktemp("go")) if request.param == "go" else rust_peer()
    except ConfigError as error:
        pytest.skip(str(error))
