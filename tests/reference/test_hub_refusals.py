"""Models that the hub cannot give, and names that mean nothing: one line names the fix for each."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants

from llmnode.errors import ConfigError, LlmnodeError, ModelError
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.models.open_model import open_model
from llmnode.models.sources import online
from llmnode.models.sources.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from llmnode.models.sources.repository import HubName, parse_hub_name
from reference.hub import NAME, Hub, Repository, save_sharded, the_hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with the_hub(tmp_path, monkeypatch) as hub:
        yield hub


def _gated(status: int) -> Callable[[Repository], Repository]:
    return lambda repository: replace(repository, error=(status, "GatedRepo"))


def _without(*files: str, **more: bytes) -> Callable[[Repository], Repository]:
    def change(repository: Repository) -> Repository:
        kept = {file: content for file, content in repository.files.items() if not file.endswith(files or "-")}
        return replace(repository, files=kept | more)

    return change


def _with_family(family: str) -> Callable[[Repository], Repository]:
    return lambda repository: replace(
        repository, files={**repository.files, CONFIG_FILE: json.dumps({"model_type": family}).encode()}
    )


def _with_index(index: Any) -> Callable[[Repository], Repository]:
    return lambda repository: replace(repository, files={**repository.files, INDEX_FILE: json.dumps(index).encode()})


@dataclass
class Refused:
    """A fault of a repository, the kind of error, and its text."""

    change: Callable[[Repository], Repository]
    kind: type[LlmnodeError]
    says: str


SAFETENSORS = (".safetensors", INDEX_FILE)
REFUSED = {
    "gated": Refused(_gated(401), ConfigError, rf"{NAME} is gated: ask for access at http.*/{NAME}, .*hf auth"),
    "gated, denied": Refused(_gated(403), ConfigError, "is gated: ask for access at"),
    "forbidden": Refused(lambda it: replace(it, error=(403, "")), ConfigError, "refuses org/small to this token"),
    "pickles": Refused(_without(*SAFETENSORS, **{"pytorch_model.bin": b""}), ModelError, "as pickles, .* @refs/pr/N"),
    "gguf": Refused(_without(*SAFETENSORS, **{"small.gguf": b""}), ModelError, r"small\.gguf, say. and give its path"),
    "no weights": Refused(_without(*SAFETENSORS), ModelError, "holds neither model.safetensors nor"),
    "no config": Refused(_without(CONFIG_FILE), ModelError, "is not a model folder: .*config.json"),
    "mpt": Refused(_with_family("mpt"), ModelError, "'mpt' are not supported; supported are: bloom, cohere"),
    "new": Refused(_with_family("new9"), ModelError, "'new9' are not supported; supported are: bloom, cohere"),
    "out": Refused(_with_index({"weight_map": {"x": "../../x"}}), ModelError, "'../../x', which is outside"),
    "absolute": Refused(_with_index({"weight_map": {"x": "/etc/x"}}), ModelError, "'/etc/x', which is outside"),
    "lacking": Refused(
        _with_index({"weight_map": {"x": "y.safetensors"}, "metadata": {}}),
        ModelError,
        "names y.safetensors, which it lacks",
    ),
    "odd index": Refused(_with_index({"weight_map": ["x"]}), ModelError, "index.json is damaged"),
    "no header": Refused(
        _without(INDEX_FILE, **{SINGLE_FILE: b"\xff" * 100}), ModelError, "holds no readable safetensors"
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_a_line(hub: Hub, saved: Path, case: str) -> None:
    refused = REFUSED[case]
    hub.repositories[NAME] = refused.change(Repository.of(saved))
    with pytest.raises(refused.kind, match=refused.says) as raised:
        open_model(NAME)
    assert "\n" not in str(raised.value)
    assert not hub.downloaded()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/none", "the hub has no model org/none, or it is private, .* `hf auth login`"),
        (f"{NAME}@v9", "no revision of that name in org/small@v9: give a branch, a tag or a commit"),
        (f"{NAME}@{'c' * 40}", "no revision of that name"),
    ],
)
def test_a_name_that_the_hub_lacks_is_told(hub: Hub, saved: Path, name: str, says: str) -> None:
    hub.repositories[NAME] = replace(Repository.of(saved), refs=("main", "v1"))
    assert open_model(f"{NAME}@v1").revision == "a" * 40
    with pytest.raises(ConfigError, match=says) as raised:
        open_model(name)
    assert "\n" not in str(raised.value)


def test_names_on_the_hub() -> None:
    assert parse_hub_name("org/name") == HubName("org/name", "main")
    assert parse_hub_name("Org-1/na_me.v2@refs/pr/3") == HubName("Org-1/na_me.v2", "refs/pr/3")
    assert parse_hub_name(f"{EMBEDDED_MODEL}@main") == HubName(EMBEDDED_MODEL, "main")
    wrong = [
        "name",
        "a/b/c",
        "/a/b",
        "./a",
        "../a/b",
        "a/..",
        "a/b@",
        "a/b@../c",
        "a/b@/c",
        "a/b c",
        "a/b.gguf",
        "a--b/c",
    ]
    for text in (*wrong, "a/b\n", "http://a/b", ""):
        assert parse_hub_name(text) is None, text


@pytest.mark.parametrize("name", ["small", "/nowhere", "./org/small", "folder/small.gguf", "http://a/b"])
def test_any_other_name_lists_what_is_possible(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"is neither {EMBEDDED_MODEL} nor a folder .* GGUF .* org/name@revision"):
        open_model(name)


@pytest.mark.parametrize(
    ("given", "ours", "libraries"),
    [
        ({}, "0", "1"),
        ({"HF_HUB_OFFLINE": "1"}, "1", "1"),
        ({"HF_HUB_OFFLINE": "0"}, "0", "0"),
        ({"TRANSFORMERS_OFFLINE": "1"}, "1", "1"),
        ({"LLMNODE_OFFLINE": "0", "HF_HUB_OFFLINE": "1"}, "0", "1"),  # a child of ours
        ({"LLMNODE_OFFLINE": "1"}, "1", "1"),
    ],
)
def test_the_users_wish_outlives_the_switch(
    given: dict[str, str], ours: str, libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLMNODE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for _parent_and_child in range(2):
        online.keep_libraries_offline()
        assert (os.environ["LLMNODE_OFFLINE"], os.environ["HF_HUB_OFFLINE"]) == (ours, libraries)
    assert online.is_offline() == (ours == "1")


def test_without_the_switch_huggingface_hubs_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMNODE_OFFLINE", raising=False)
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert online.is_offline() == offline
