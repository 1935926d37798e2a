"""From the name of a model to its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.hub_names import HUB
from llmnode.core.user_input import expand_path
from llmnode.errors import ConfigError
from llmnode.models.embedded import open_embedded
from llmnode.models.gguf.convert import is_gguf, open_gguf
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.models.sources.folder import open_folder
from llmnode.models.sources.hub import open_hub
from llmnode.models.sources.repository import parse_hub_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.models.sources.folder import ModelFolder


def open_model(name: str | None = None, report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """The model of a `name`: a path, or a name on the hub. None is the embedded model.

    A path is that of a folder with safetensors, or of a GGUF file. A name on the hub is `org/name`, and `@revision` may
    follow (a branch, a tag or a commit; the newest by default). After `hub:` it is never a path. The embedded model
    with a revision is the hub's. No tensor is read yet, and none is downloaded: that happens when a part is loaded.
    `report` gets a line before each slow step, now and then. Raises ConfigError for any other name, ModelError for a
    model that is not whole or that we cannot run.
    """
    is_on_hub = name is not None and name.startswith(HUB)
    name = name and name.removeprefix(HUB)
    if name is None or name == EMBEDDED_MODEL:
        return open_embedded(report)
    path = None if is_on_hub else _path_of(name)
    if path is not None and path.is_dir():
        return open_folder(path, path.name, report=report)
    if path is not None and path.is_file():
        if not _is_gguf(path):
            raise ConfigError(f"{name} is a file and no GGUF: name the folder that holds config.json and safetensors")
        return open_gguf(path, report)
    if (on_the_hub := parse_hub_name(name)) is not None:
        return open_hub(on_the_hub, report)
    raise ConfigError(
        f"{name!r} is neither {EMBEDDED_MODEL} nor a folder with safetensors, a GGUF file, "
        "or a name on the Hugging Face hub (org/name or org/name@revision)"
    )


def _path_of(name: str) -> Path | None:
    """None if there is none by that name. Raises ConfigError for one that may not be looked at."""
    try:
        path = expand_path(name).resolve(strict=True)
    except PermissionError as error:
        raise ConfigError(f"the model {name}: cannot be read ({error.strerror})") from error
    except (OSError, ValueError, RuntimeError):  # no such file, no possible name of a file, or no such user
        return None
    return path


def _is_gguf(path: Path) -> bool:
    try:
        return is_gguf(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
