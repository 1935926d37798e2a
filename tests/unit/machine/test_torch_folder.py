"""The folder for what torch compiles, where the cache can only be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.machine.cache_folder import CACHE, TORCH_CACHE, torch_folder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_torch_has_a_folder_in_the_cache_unless_it_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    assert torch_folder() == tmp_path / TORCH_CACHE
    monkeypatch.setattr("os.access", lambda _path, _mode: False)  # the tests' user may be root, which may write it
    assert torch_folder() is None
    (tmp_path / TORCH_CACHE).mkdir()
    assert torch_folder() == tmp_path / TORCH_CACHE
