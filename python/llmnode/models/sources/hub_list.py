"""Lists the adapters that the Hugging Face hub has for a base model, by tags in their cards, and the commits of one.

Torch is not imported. PEFT puts the tag into the card of each adapter that it saves. Nothing is downloaded.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from llmnode.core.hub_names import ADAPTER_TAG, REVISION_TAG
from llmnode.errors import ConfigError
from llmnode.models.sources.online import hub_access, is_offline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from huggingface_hub import GitCommitInfo, ModelInfo

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


@dataclass(frozen=True, slots=True)
class HubVersion:
    """A commit of an adapter on the hub, its date, and the title that its author gave it: text of strangers."""

    revision: str
    made: str
    title: str


def adapters_on_hub(base: str, most: int) -> Sequence[HubAdapter]:
    """Lists the adapters for the model `base` (`org/name`), the most downloaded first, `most` of them at most.

    Blocks, for half a minute if the hub cannot be reached. Raises ConfigError if it cannot be asked.
    """
    from huggingface_hub import HfApi

    with _asking(f"the adapters of {base}", "list models"):
        found = HfApi().list_models(
            filter=ADAPTER_TAG + base,
            sort="downloads",
            limit=most,
            expand=["sha", "lastModified", "downloads", "pipeline_tag", "tags"],
        )
        return [_read(each) for each in found]


def versions_on_hub(adapter: str, most: int) -> Sequence[HubVersion]:
    """Lists the commits of an adapter (`org/name`), the newest first, `most` of them at most. Else as above."""
    from huggingface_hub import HfApi

    with _asking(adapter, "list commits"):
        return [_version(each) for each in islice(HfApi().list_repo_commits(adapter), most)]


@contextmanager
def _asking(what: str, how: str) -> Iterator[None]:
    """Within it the hub is asked for `what`. `how` says what a hub does then."""
    from huggingface_hub import constants

    if is_offline():
        raise ConfigError(
            "the hub cannot be asked for adapters: the network is switched off (LLMNODE_OFFLINE or HF_HUB_OFFLINE is "
            "set); leave out --hub and --versions, or unset it"
        )
    with hub_access(what):
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # what huggingface_hub makes of other JSON
            raise ConfigError(
                f"{constants.ENDPOINT} does not {how} as a hub does: check HF_ENDPOINT and the proxy's settings"
            ) from error


def _version(commit: GitCommitInfo) -> HubVersion:
    return HubVersion(str(commit.commit_id), commit.created_at.date().isoformat(), str(commit.title))


def _read(info: ModelInfo) -> HubAdapter:
    tags = [str(tag) for tag in info.tags or ()]
    task = info.pipeline_tag or next((tag for tag in tags if tag in _TASKS), "")
    revision = next((tag.removeprefix(REVISION_TAG) for tag in tags if tag.startswith(REVISION_TAG)), "")
    updated = "" if info.last_modified is None else info.last_modified.date().isoformat()
    return HubAdapter(str(info.id), str(info.sha or ""), updated, int(info.downloads or 0), str(task), revision)
