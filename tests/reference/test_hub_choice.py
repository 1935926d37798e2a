"""The files of a repository that are the model are chosen as in a folder, and chosen again without a network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.models.load import load_ends, load_span
from llmnode.models.open_model import open_model
from llmnode.models.sources.checkpoint import ADAPTER_FILE, CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from llmnode.models.sources.folder import open_folder
from llmnode.models.sources.identity import hub_weights
from reference.hub import NAME, Hub, Repository, save_sharded, sha256, the_hub
from reference.small import make_model, save_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.reference

OTHER = "other.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, beside an older index and its shards."""
    path = save_sharded(tmp_path_factory.mktemp("saved"))
    newer = tmp_path_factory.mktemp("newer")
    save_model(newer, "llama", tied=False, seed=1)
    (path / SINGLE_FILE).write_bytes((newer / SINGLE_FILE).read_bytes())
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with the_hub(tmp_path, monkeypatch) as hub:
        yield hub


def test_one_file_comes_before_an_index(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    folder = open_model(NAME)
    expected = open_folder(saved, NAME, hub_weights("a" * 40))
    assert folder.digest == expected.digest
    assert {file.name for file in (*folder.files.values(), *expected.files.values())} == {SINGLE_FILE}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for file in (INDEX_FILE, *(each for each in hub.repositories[NAME].files if each.startswith("model-"))):
        huggingface_hub.hf_hub_download(NAME, file)  # as another program may
    with monkeypatch.context() as offline:
        offline.setenv("LLMNODE_OFFLINE", "1")
        again = open_model(NAME)
        assert again.digest == folder.digest
        with pytest.raises(ConfigError, match=f"needs {SINGLE_FILE}, which is not in the cache"):
            load_span(again, Span(0, 1), "sdpa")
    hub.asked.clear()
    load_span(folder, Span(0, 1), "sdpa")
    assert hub.downloaded() == {sha256((saved / SINGLE_FILE).read_bytes())}


def test_of_what_another_program_has_downloaded_it_is_so_too(
    hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for file in (CONFIG_FILE, INDEX_FILE, SINGLE_FILE):
        huggingface_hub.hf_hub_download(NAME, file)
    monkeypatch.setenv("LLMNODE_OFFLINE", "1")
    folder = open_model(NAME)
    assert folder.digest == open_folder(saved, NAME, hub_weights("a" * 40)).digest
    load_ends(folder)


def test_a_cache_without_weights_says_that_it_has_only_a_part(
    hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.hf_hub_download(NAME, CONFIG_FILE)
    monkeypatch.setenv("LLMNODE_OFFLINE", "1")
    with pytest.raises(ConfigError, match="has only a part of org/small, and the network is switched off"):
        open_model(NAME)


def test_a_file_that_the_config_names_comes_before_all(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = repository = Repository.of(saved)
    repository.files[OTHER] = repository.files[SINGLE_FILE]
    _change_config(repository, transformers_weights=OTHER)
    folder = open_model(NAME)
    load_span(folder, Span(0, 1), "sdpa")
    assert {file.name for file in folder.files.values()} == {OTHER}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"model.fp16.safetensors": b""}, r"only the variant model\.fp16\.safetensors"),
        ({ADAPTER_FILE: b'{"base_model_name_or_path": "org/base"}'}, "PEFT adapter of the model org/base, .* merge it"),
        ({"consolidated.safetensors": b""}, r"but consolidated\.safetensors: get the index too"),
        ({"main/config.json": b"{}"}, "its folder main does"),
    ],
)
def test_a_repository_without_weights_for_us_says_what_it_has(hub: Hub, files: dict[str, bytes], says: str) -> None:
    config = (
        {} if ADAPTER_FILE in files else {CONFIG_FILE: make_model("gpt2", tied=True).config.to_json_string().encode()}
    )
    hub.repositories[NAME] = Repository(config | files)
    with pytest.raises(ModelError, match=f"{NAME} is not a model folder: it .*{says}") as raised:
        open_model(NAME)
    assert "\n" not in str(raised.value)


def test_weights_that_are_quantized_are_refused_before_any_is_asked_for(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = repository = Repository.of(saved)
    _change_config(repository, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelError, match="weights quantized by awq"):
        open_model(NAME)
    assert not [asked for asked in hub.asked if "safetensors" in asked.path or "/cdn/" in asked.path]


def _change_config(repository: Repository, **change: Any) -> None:
    repository.files[CONFIG_FILE] = json.dumps({**json.loads(repository.files[CONFIG_FILE]), **change}).encode()
