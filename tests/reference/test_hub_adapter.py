"""An adapter on the hub: its two files alone are downloaded, once, and it is what the folder would be.

The hub is one on loopback (`reference/hub.py`), and huggingface_hub the real one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.core.model import ModelInfo
from llmnode.errors import AdapterError, ConfigError, ModelError
from llmnode.models import peft_folder
from llmnode.models.peft_folder import downloaded, find_adapter, read_adapter, read_named
from llmnode.models.sources.checkpoint import ADAPTER_FILE, ADAPTER_PICKLE_FILE, ADAPTER_WEIGHTS_FILE
from reference.hub import Repository, the_hub
from reference.test_peft_folder import saved

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reference.hub import Hub

pytestmark = pytest.mark.reference

NAME = "org/pirate"
COMMIT = "a" * 40
Adapted = tuple[ModelInfo, "Path"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """A model, and a folder with an adapter for it."""
    path = tmp_path_factory.mktemp("llama")
    return saved("llama", path)[0].info, path / "adapters" / "one"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with the_hub(tmp_path, monkeypatch) as hub:
        yield hub


def test_it_is_the_adapter_of_the_folder_and_needs_no_network_again(
    hub: Hub, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, path = adapted
    hub.repositories[NAME] = Repository.of(path, **{"optimizer.pt": b"a pickle"})
    expected = read_adapter(str(path), info).adapter.digest
    for text, name in ((NAME, "pirate"), (f"hub:{NAME}@main", "pirate"), (f"parrot={NAME}@{COMMIT}", "parrot")):
        said: list[str] = []
        found = read_named(text, info, said.append)
        assert (found.name, found.adapter.digest) == (name, expected)
        assert said or COMMIT in text, "a commit that is here is not asked for"
    asked = {each.path.rpartition("/")[2] for each in hub.asked if "/resolve/" in each.path}
    assert asked == {ADAPTER_FILE, ADAPTER_WEIGHTS_FILE}
    count = len(hub.asked)
    monkeypatch.setenv("LLMNODE_OFFLINE", "1")
    assert read_adapter(NAME, info).adapter.digest == expected
    assert read_adapter(downloaded(f"{NAME}@{COMMIT}", print), info).adapter.digest == expected
    with pytest.raises(ConfigError, match=r"org/other is not in the cache .* run once with the network"):
        read_adapter("org/other", info)
    assert len(hub.asked) == count


def _without(*names: str, **more: bytes) -> Any:
    def change(files: dict[str, bytes]) -> dict[str, bytes]:
        return {name: content for name, content in files.items() if name not in names} | more

    return change


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (_without(ADAPTER_FILE), AdapterError, "it is no adapter of PEFT"),
        (_without(ADAPTER_WEIGHTS_FILE), AdapterError, "it is not there"),
        (_without(ADAPTER_WEIGHTS_FILE, **{ADAPTER_PICKLE_FILE: b"pickle"}), AdapterError, "is a pickle"),
        (_without(**{ADAPTER_WEIGHTS_FILE: b"what"}), AdapterError, "no safetensors, or is damaged"),
        (_without(**{ADAPTER_FILE: json.dumps({"peft_type": "IA3"}).encode()}), AdapterError, "servers compute LoRA"),
    ],
    ids=["no adapter", "no weights", "a pickle", "damaged", "no LoRA"],
)
def test_what_is_no_adapter_that_servers_compute_is_refused(
    change: Any, error: type[Exception], why: str, hub: Hub, adapted: Adapted
) -> None:
    info, path = adapted
    hub.repositories[NAME] = Repository(change(Repository.of(path).files))
    with pytest.raises(error, match=why):
        read_adapter(NAME, info)
    assert not any(each.path.endswith(ADAPTER_PICKLE_FILE) for each in hub.asked)


def test_an_adapter_that_is_too_large_is_not_downloaded(
    hub: Hub, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, path = adapted
    hub.repositories[NAME] = Repository.of(path)
    monkeypatch.setattr(peft_folder, "MOST_BYTES", 1000)
    with pytest.raises(AdapterError, match=f"{NAME} on the hub has 0 MiB"):
        read_adapter(NAME, info)
    assert not hub.downloads()


def test_a_file_that_arrives_damaged_or_is_damaged_in_the_cache_is_refused(hub: Hub, adapted: Adapted) -> None:
    info, path = adapted
    hub.repositories[NAME] = Repository.of(path)
    hub.corrupt = True
    with pytest.raises(ModelError, match="arrived damaged"):
        read_adapter(NAME, info)
    hub.corrupt = False
    blob = (peft_folder.adapter_folder(NAME) / ADAPTER_WEIGHTS_FILE).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(ModelError, match="is not what the hub has"):
        read_adapter(NAME, info)


def test_a_folder_comes_before_the_hub_unless_the_name_says_hub(
    hub: Hub, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert find_adapter(NAME) == (tmp_path / NAME).relative_to(tmp_path)
    assert str(find_adapter(f"hub:{NAME}")) == NAME
    assert find_adapter("pirate") is None and find_adapter(adapted[0].digest.hex()) is None
    with pytest.raises(ConfigError, match=f"the hub has no model {NAME}"):
        peft_folder.adapter_folder(f"hub:{NAME}")
    assert hub.asked
