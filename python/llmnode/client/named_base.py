"""Decides how a saved adapter names its base: by the model's name, its commit on the hub, its digest, and the task.

PEFT takes the name from the model. It asks nobody for the commit, so the configs of PEFT get it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmnode.core.hub_names import ADAPTER_TAG, REVISION_TAG, split_hub_name
from llmnode.core.identity import commit_of, is_commit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.model import ModelInfo

_OURS = "_llmnode_revision"
"""The revision that we have put into a config, which is then used for another model."""


def facts_of(base: ModelInfo) -> dict[str, str]:
    """Returns the facts about the `base` for a file of tensors. A model that is not from the hub has no revision."""
    return {"base_model": base.name, **dict(tag.split(":") for tag in _of_weights(base))}


def tags_of(base: ModelInfo, task: str) -> list[str]:
    """Returns the tags for the card of an adapter. `task` is a pipeline of the hub, such as "text-generation"."""
    on_hub = [ADAPTER_TAG + base.name] if split_hub_name(base.name) is not None else []
    return ["llmnode", task, *on_hub, *_of_weights(base)]


def _of_weights(base: ModelInfo) -> list[str]:
    commit = commit_of(base.digest)
    return [*([] if commit is None else [REVISION_TAG + commit]), f"base_model_digest:{base.digest.hex()}"]


def name_base(configs: Iterable[Any], base: ModelInfo) -> None:  # Any: of PEFT, which is not imported
    """Give the configs of PEFT the revision of the `base`, unless the user has named one, and no path of this machine.

    The commit of another base, with which an adapter was saved, makes place for that of this one. Earlier versions of
    llmnode wrote a path as the base's name.
    """
    commit = commit_of(base.digest)
    for config in configs:
        is_saved = commit is not None and is_commit(config.revision or "")
        if is_saved or config.revision in (None, getattr(config, _OURS, None)):
            config.revision = commit
            setattr(config, _OURS, commit)
        if Path(config.base_model_name_or_path or "").is_absolute():
            config.base_model_name_or_path = base.name
