"""From the name of a model to its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError
from llmnode.models.embedded import EMBEDDED_MODEL, open_embedded
from llmnode.models.folder import open_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.folder import ModelFolder


def open_model(name: str | None = None, report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """The embedded model (also for None), or the model in the folder that `name` is the path of.

    Raises ConfigError for any other name, ModelError for a folder that is not a whole model.
    """
    if name is None or name == EMBEDDED_MODEL:
        return open_embedded(report)
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{name!r} is neither {EMBEDDED_MODEL} nor a folder with a model in safetensors")
    return open_folder(path.resolve(), path.resolve().name, "local")
