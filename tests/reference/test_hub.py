"""A model on the hub: only what a part needs is downloaded, resumed, found again without a network, and exact.

The hub is one on loopback (`reference/hub.py`), and huggingface_hub the real one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, file_download

from llmnode.core.identity import commit_of
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.models.load import load_ends, load_span
from llmnode.models.open_model import open_model
from llmnode.models.sources import download
from llmnode.models.sources.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from llmnode.models.sources.folder import open_folder
from llmnode.models.sources.identity import hub_weights
from llmnode.models.text.tokenizer import load_tokenizer
from llmnode.net.invite import Invite, read_invite, write_invite
from reference.hub import NAME, Hub, Repository, new_caches, save_sharded, sha256, the_hub
from reference.small import BLOCKS, VOCABULARY, cut, deviation, make_model, save_model, session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with the_hub(tmp_path, monkeypatch) as hub:
        yield hub


def shards_of(saved: Path, *prefixes: str) -> set[str]:
    """The SHA-256 of the shards that hold tensors of these prefixes."""
    weight_map: dict[str, str] = json.loads((saved / INDEX_FILE).read_text())["weight_map"]
    files = {file for name, file in weight_map.items() if name.startswith(prefixes)}
    return {sha256((saved / file).read_bytes()) for file in files}


def test_a_part_downloads_its_shards_and_no_other(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    folder = open_model(NAME)
    assert not hub.downloaded()
    load_span(folder, Span(3, 4), "sdpa")
    needed = shards_of(saved, "model.layers.3.")
    assert hub.downloaded() == needed
    asked = len(hub.asked)
    load_span(folder, Span(3, 4), "sdpa")
    assert len(hub.asked) == asked
    load_ends(folder)
    ends = shards_of(saved, "model.embed_tokens.", "model.norm.", "lm_head.")
    assert hub.downloaded() == needed | ends
    assert needed | ends < shards_of(saved, "")


def test_the_model_of_an_invite_is_the_hubs_and_no_folder_of_that_name(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    shutil.copytree(saved, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert commit_of(open_model(NAME).digest) is None, "its user names the folder"
    invited = read_invite(write_invite(Invite((), None, NAME)))
    assert commit_of(open_model(invited.hub_model).digest) is not None
    assert hub.asked


def test_peers_with_other_parts_have_the_same_digest(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    first = open_model(NAME)
    load_span(first, Span(0, 1), "sdpa")
    again = open_model(NAME)
    new_caches(tmp_path / "second", monkeypatch)
    second = open_model(f"{NAME}@main")
    load_span(second, Span(4, 5), "sdpa")
    whole = open_folder(saved, NAME, hub_weights("a" * 40))  # from the files themselves
    assert first.digest == again.digest == second.digest == whole.digest
    assert first.revision == "a" * 40 and first.name == NAME
    hub.repositories[NAME].commit = "b" * 40
    assert open_model(NAME).digest != first.digest


@pytest.mark.parametrize(
    ("case", "tied", "sharded"),
    [("llama", False, True), ("qwen2", True, False), ("gpt2", True, True), ("mixtral", False, True)],
)
@torch.inference_mode()
def test_what_it_computes_is_what_transformers_does(
    hub: Hub, case: str, tied: bool, sharded: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    make_model(case, tied=tied).save_pretrained(tmp_path / "saved", max_shard_size="60KB" if sharded else "1GB")
    hub.repositories[NAME] = Repository.of(tmp_path / "saved")
    assert (SINGLE_FILE in hub.repositories[NAME].files) != sharded
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(4))
    ours = cut(open_model(NAME), (0, 2, BLOCKS))
    scores = ours.ends.logits(ours.forward({session(0): ids[0].tolist()})[session(0)])
    expected = model(ids).logits[0]
    assert (scores - expected).abs().max() < max(4 * deviation(model, ids), 1e-5)
    assert torch.equal(scores.argmax(-1), expected.argmax(-1))


def test_what_is_in_the_cache_needs_no_network(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    online_folder = open_model(NAME)
    load_span(online_folder, Span(0, 2), "sdpa")
    asked = len(hub.asked)
    monkeypatch.setenv("LLMNODE_OFFLINE", "1")
    for name in (NAME, f"{NAME}@{'a' * 40}"):
        folder = open_model(name)
        assert folder.digest == online_folder.digest
        load_span(folder, Span(0, 2), "sdpa")
        with pytest.raises(ConfigError, match=r"which is not in the cache, and the network is switched off"):
            load_span(folder, Span(2, 5), "sdpa")
    with pytest.raises(ConfigError, match=r"org/other is not in the cache .* run once with the network"):
        open_model("org/other")
    assert len(hub.asked) == asked


def test_a_commit_that_is_in_the_cache_is_not_asked_for(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    open_model(NAME)
    asked = len(hub.asked)
    folder = open_model(f"{NAME}@{'a' * 40}")
    assert len(hub.asked) == asked
    load_span(folder, Span(0, 1), "sdpa")
    assert len(hub.asked) > asked


def test_a_hub_that_is_out_of_reach_is_told_and_the_cache_used(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    digest = open_model(NAME).digest
    hub.status = 503
    lines: list[str] = []
    assert open_model(NAME, lines.append).digest == digest
    assert lines[1:] == [f"{hub.url} cannot be reached: using {NAME} as it was last, {'a' * 12}"]
    with pytest.raises(ConfigError, match=r"the hub answered 503 .* run again later"):
        open_model("org/other")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert open_model(NAME).digest == digest
    new_caches(tmp_path / "second", monkeypatch)
    with pytest.raises(ConfigError, match=r"cannot reach http://127.0.0.1:9 .*: check the network"):
        open_model(NAME)


def test_files_that_another_program_has_downloaded_are_used(
    hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for file in hub.repositories[NAME].files:
        huggingface_hub.hf_hub_download(NAME, file)
    asked = len(hub.asked)
    monkeypatch.setenv("LLMNODE_OFFLINE", "1")
    folder = open_model(NAME)
    load_span(folder, Span(0, BLOCKS), "sdpa")
    load_ends(folder)
    assert len(hub.asked) == asked
    assert folder.digest == open_folder(saved, NAME, hub_weights("a" * 40)).digest


def test_a_cache_that_may_only_be_read_is_used(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    hub.repositories[NAME] = Repository.of(saved, **{"README.md": b"changed"})
    load_span(open_model(NAME), Span(0, 1), "sdpa")
    hub.repositories[NAME].refs = ("main", "v2")
    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    load_span(open_model(f"{NAME}@v2"), Span(0, 1), "sdpa")


def test_nothing_but_what_was_named_goes_to_the_network(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    folder = open_model(NAME)
    load_ends(folder)
    assert constants.HF_HUB_OFFLINE
    asked = len(hub.asked)
    with pytest.raises(huggingface_hub.errors.OfflineModeIsEnabled):
        huggingface_hub.model_info(NAME)
    with pytest.raises(ModelError, match="no usable tokenizer"):  # it has none
        load_tokenizer(folder)
    assert len(hub.asked) == asked
    assert {asked.path.split("/resolve/")[0] for asked in hub.asked if "/cdn/" not in asked.path} == {
        f"/{NAME}",
        f"/api/models/{NAME}/revision/main",
    }


def test_the_token_is_for_the_hub_alone(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    load_span(open_model(NAME), Span(0, 1), "sdpa")
    assert all(asked.authorized != asked.path.startswith("/cdn/") for asked in hub.asked)
    assert hub.downloaded()


def test_code_and_pickles_are_not_downloaded(hub: Hub, saved: Path) -> None:
    code = {"modeling_small.py": b"raise SystemExit", "pytorch_model.bin": b"cos\nsystem", "tokenizer.py": b"1/0"}
    hub.repositories[NAME] = repository = Repository.of(saved, **code)
    config = json.loads(repository.files[CONFIG_FILE])
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_small.Small")
    repository.files[CONFIG_FILE] = json.dumps(config).encode()
    load_span(open_model(NAME), Span(0, 1), "sdpa")
    assert not [asked for asked in hub.asked if asked.path.endswith((".py", ".bin"))]


def test_the_tokenizer_and_what_belongs_to_it_comes_with_the_model(hub: Hub, saved: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"hello": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    others = {"README.md": b"", "onnx/tokenizer.json": b"", "additional_chat_templates/tool.jinja": b""}
    hub.repositories[NAME] = repository = Repository.of(saved)
    repository.files |= Repository.of(tmp_path / "tokenizer", **others).files
    loaded = load_tokenizer(open_model(NAME))
    assert loaded.encode("hello") == loaded.encode_dialogue([("user", "hello")]) == [0]
    asked = {asked.path.partition(f"/resolve/{'a' * 40}/")[2] for asked in hub.asked}
    assert {"tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja", CONFIG_FILE} <= asked
    assert not {"README.md", "onnx/tokenizer.json"} & asked


@pytest.mark.parametrize("breaks", [1, 3])
def test_a_broken_connection_is_resumed(hub: Hub, breaks: int, tmp_path: Path) -> None:
    save_model(tmp_path / "saved", "llama", tied=False)
    hub.repositories[NAME] = repository = Repository.of(tmp_path / "saved")
    lines: list[str] = []
    folder = open_model(NAME, lines.append)
    hub.cut = [40_000] * breaks
    load_span(folder, Span(0, 1), "sdpa")
    ranges = [asked.range for asked in hub.downloads()]
    assert len(ranges) == breaks + 1 and ranges[0] is None
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in ranges[1:] if asked]
    assert starts == [(40_000 // 1024) * 1024 * (number + 1) for number in range(breaks)]
    assert (folder.path / SINGLE_FILE).read_bytes() == repository.files[SINGLE_FILE]
    assert lines[:2] == [f"asking the hub for {NAME}", f"downloading 1 MiB of {NAME}: {SINGLE_FILE}"]
    assert 9 <= len(lines[2:]) <= 11 and lines[-1] == f"downloaded 1 MiB of 1 MiB of {NAME}"


PROGRAM = """
from llmnode.models.sources.online import keep_libraries_offline
keep_libraries_offline()
from huggingface_hub import constants
assert constants.HF_HUB_OFFLINE
constants.DOWNLOAD_CHUNK_SIZE = 1024
from llmnode.core.span import Span
from llmnode.models.load import load_span
from llmnode.models.open_model import open_model
load_span(open_model("org/small", lambda line: print(line, flush=True)), Span(0, 1), "sdpa")
"""


def test_a_killed_download_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    """Also: in a process of its own, all is found by the environment alone."""
    save_model(tmp_path / "saved", "llama", tied=False)
    hub.repositories[NAME] = repository = Repository.of(tmp_path / "saved")
    hub.cut, hub.stall = [100_000], True
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LLMNODE_"))}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_HOME": str(tmp_path)}
    environment |= {"LLMNODE_CACHE": os.environ["LLMNODE_CACHE"]}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"asking the hub for {NAME}\n"
            assert process.stdout.readline().startswith("downloading ")
            assert process.stdout.readline().startswith("downloaded ")
        finally:
            process.kill()
    hub.stall = False
    folder = open_model(NAME)
    load_span(folder, Span(0, 1), "sdpa")
    first, second = (asked.range for asked in hub.downloads())
    assert first is None and second is not None and int(second.removeprefix("bytes=").rstrip("-")) > 60_000
    assert (folder.path / SINGLE_FILE).read_bytes() == repository.files[SINGLE_FILE]
    assert not list((folder.path.parent.parent / "blobs").glob("*incomplete"))


def test_what_arrives_damaged_is_not_kept(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    folder = open_model(NAME)
    hub.corrupt = True
    with pytest.raises(ModelError, match=r"model-0000.* of org/small arrived damaged: run again"):
        load_span(folder, Span(0, 1), "sdpa")
    hub.corrupt = False
    load_span(folder, Span(0, 1), "sdpa")


def test_what_is_damaged_in_the_cache_is_not_read(hub: Hub, saved: Path) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    load_span(open_model(NAME), Span(0, 1), "sdpa")
    folder = open_model(NAME)
    file = folder.files["model.layers.0.mlp.up_proj.weight"]
    blob = file.resolve()
    content = blob.read_bytes()
    blob.chmod(0o644)
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelError, match=rf"is not what the hub has: remove {blob}, and run again"):
        load_span(folder, Span(0, 1), "sdpa")
    blob.unlink()
    load_span(folder, Span(0, 1), "sdpa")
    assert blob.read_bytes() == content


def test_a_disk_that_is_too_full_is_told_before_the_download(
    hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository.of(saved)
    folder = open_model(NAME)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"1 MiB free and .* set HF_HUB_CACHE to another disk"):
        load_span(folder, Span(0, 1), "sdpa")
    assert not hub.downloaded()


def test_a_disk_that_fills_up_is_told(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.repositories[NAME] = Repository.of(saved)
    folder = open_model(NAME)
    monkeypatch.setattr(file_download, "http_get", write)
    with pytest.raises(ConfigError, match=r"the disk is full, .* free some space, or set HF_HUB_CACHE"):
        load_span(folder, Span(0, 1), "sdpa")


def test_progress_is_told_by_tenths_and_by_gib() -> None:
    for total_bytes, fewest, most in ((1000, 10, 10), (50 << 30, 45, 50), (0, 0, 0)):
        lines: list[str] = []
        progress = download.DownloadProgress(lines.append, NAME, total_bytes)
        for _ in range(1000):
            progress.add(total_bytes // 1000)
        assert fewest <= len(lines) <= most
