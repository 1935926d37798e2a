"""Lists the adapters that the Hugging Face hub has for a base model, by the tags in their cards. Torch is not imported.

PEFT puts the tag into the card of each adapter that it saves. Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.hub_names import ADAPTER_TAG, REVISION_TAG
from llmnode.errors import ConfigError
from llmnode.models.sources.online import hub_access, is_offline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from huggingface_hub import ModelInfo

_TASKS = frozenset({"text-generation", "text-classification", "token-classification"})


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """An adapter on the hub. All of it is its author's word, and text of strangers.

    `revision` is its newest commit, `base_revision` the commit of the base for which it was trained, and `updated` a
    date. Each is empty if the hub does not say it.
    """

    name: str
    revision: str
    updated: str
    downloads: int
    task: str
    base_revision: str


def adapters_on_hub(base: str, most: int) -> Sequence[HubAdapter]:
    """Lists the adapters for the model `base` (`org/name`), the most downloaded first, `most` of them at most.

    Blocks, for half a minute if the hub cannot be reached. Raises ConfigError if it cannot be asked.
    """
    from huggingface_hub import HfApi, constants

    if is_offline():
        raise ConfigError(
            "the hub cannot be asked for adapters: the network is switched off (LLMNODE_OFFLINE or HF_HUB_OFFLINE is "
            "set); leave out --hub, or unset it"
        )
    with hub_access(f"the adapters of {base}"):
        try:
            found = HfApi().list_models(
                filter=ADAPTER_TAG + base,
                sort="downloads",
                limit=most,
                expand=["sha", "lastModified", "downloads", "pipeline_tag", "tags"],
            )
            return [_read(each) for each in found]
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # what huggingface_hub makes of other JSON
            raise ConfigError(
                f"{constants.ENDPOINT} does not list models as a hub does: check HF_ENDPOINT and the proxy's settings"
            ) from error


def _read(info: ModelInfo) -> HubAdapter:
    tags = [str(tag) for tag in info.tags or ()]
    task = info.pipeline_tag or next((tag for tag in tags if tag in _TASKS), "")
    revision = next((tag.removeprefix(REVISION_TAG) for tag in tags if tag.startswith(REVISION_TAG)), "")
    updated = "" if info.last_modified is None else info.last_modified.date().isoformat()
    return HubAdapter(str(info.id), str(info.sha or ""), updated, int(info.downloads or 0), str(task), revision)
