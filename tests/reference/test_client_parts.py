"""The client's own part of a model, by the name of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llmnode.client.connect import load_parts
from llmnode.errors import ConfigError
from reference.small import open_saved, save_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.reference


def test_a_path_is_as_good_as_an_opened_folder(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    assert load_parts(str(tmp_path)).model.blocks == load_parts(open_saved(tmp_path)).model.blocks


def test_another_name_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'/no/such' is neither"):
        load_parts("/no/such")
