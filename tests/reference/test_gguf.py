"""A GGUF file is converted once, into what transformers reads from it; what would come out wrong is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.machine.cache_folder import cache_folder
from llmnode.machine.startup import collection_paused
from llmnode.models.gguf import convert as ours
from llmnode.models.load import load_span
from llmnode.models.open_model import open_model
from llmnode.models.sources.checkpoint import CONFIG_FILE, SINGLE_FILE
from llmnode.models.sources.file_digests import sha256_of
from llmnode.models.text.tokenizer import load_tokenizer
from reference.gguf_files import File, of_model
from reference.small import BLOCKS, VOCABULARY, cut, deviation, make_model, session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return of_model(_llama(tied=False), "llama").write(tmp_path / "small.gguf")


def _llama(*, tied: bool) -> Any:
    return make_model("llama", tied=tied, attention_bias=False)


@pytest.mark.parametrize("quantization", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0], ids=["F32", "Q8_0"])
@pytest.mark.parametrize(("case", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
@torch.inference_mode()
def test_it_is_what_transformers_reads(
    case: str, tied: bool, quantization: GGMLQuantizationType, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    # The metadata that GGUF files of these families always have, as transformers reads it.
    options: dict[str, Any] = {"attention_bias": False} if case == "llama" else {"use_sliding_window": False}
    original = make_model(case, tied=tied, **({**options, "head_dim": 128} if case == "qwen3" else options))
    file = of_model(original, case, quantization=quantization).write(tmp_path / "Small-Q8.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="float32").eval()
    ids = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(4))
    if quantization is GGMLQuantizationType.F32:
        assert torch.allclose(model(ids).logits, original(ids).logits, atol=1e-4)  # the file is right
    lines: list[str] = []
    folder = open_model(str(file), lines.append)
    assert folder.name == "Small-Q8" and len(folder.revision) == 40
    size_mib = 3 if case == "qwen3" else 1
    assert lines == [f"converting Small-Q8 from GGUF to safetensors, once ({size_mib} MiB)"]
    ours = cut(folder, (0, 2, BLOCKS))
    scores = ours.ends.logits(ours.forward({session(0): ids[0].tolist()})[session(0)])
    expected = model(ids).logits[0]
    assert (scores - expected).abs().max() < max(4 * deviation(model, ids), 1e-5)
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("hi")) == "hi"


def test_it_is_converted_once_and_known_by_its_content(llama: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = open_model(str(llama), lines.append)
    assert open_model(str(llama), lines.append).digest == first.digest
    assert len(lines) == 1
    copy = tmp_path / "elsewhere" / llama.name
    copy.parent.mkdir()
    shutil.copy(llama, copy)
    assert open_model(str(copy), lines.append).path == first.path
    renamed = shutil.copy(llama, tmp_path / "renamed.gguf")
    assert open_model(str(renamed)).digest == first.digest
    of_model(make_model("llama", tied=False, attention_bias=False, seed=1), "llama").write(llama)
    changed = open_model(str(llama), lines.append)
    assert changed.path != first.path and changed.digest != first.digest
    assert len(lines) == 2


def test_it_is_parsed_once_however_often_it_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    init = gguf.GGUFReader.__init__

    def counted(reader: gguf.GGUFReader, path: str) -> None:
        parsed.append(path)
        init(reader, path)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    before = (gguf.GGUFReader, gguf.get_tensor_name_map)
    open_model(str(llama))
    assert parsed == [str(llama)]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before, "others' ways to read are as they were"


def test_nothing_of_a_conversion_waits_for_a_collection(llama: Path) -> None:
    """Objects that are loaded are left out of later ones (`collection_paused`), and their garbage with them."""
    with collection_paused():
        open_model(str(llama))
        of_conversion = gc.collect()
        open_model(str(llama))
        assert of_conversion <= 3 * gc.collect()


def test_the_writers_version_of_transformers_is_not_part_of_the_identity(llama: Path) -> None:
    folder = open_model(str(llama))
    config = json.loads((folder.path / CONFIG_FILE).read_text())
    (folder.path / CONFIG_FILE).write_text(json.dumps({**config, "transformers_version": "99"}))
    assert open_model(str(llama)).digest == folder.digest


def test_who_was_killed_leaves_nothing_behind(llama: Path) -> None:
    whole = open_model(str(llama)).path
    left_behind = whole.with_name(f"{whole.name}.partial-killed")
    whole.rename(left_behind)
    (left_behind / CONFIG_FILE).unlink()
    open_model(str(llama))
    assert sorted(entry.name for entry in whole.parent.iterdir()) == [whole.name, f"{whole.name}.lock"]


def _of_family(architecture: str) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.architecture = architecture

    return change


REFUSED: dict[str, tuple[Callable[[File], object], str]] = {
    "a tensor less": (lambda file: file.tensors.pop("blk.3.ffn_up.weight"), r"has no usable model\.layers\.3"),
    "a tensor more": (
        lambda file: file.tensors.update({"blk.3.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}),
        r"has the tensor blk\.3\.ffn_gate_inp\.weight \(1 such\), which this model has no place for",
    ),
    "bloom": (_of_family("bloom"), "architecture bloom is not supported yet; supported are: gemma2, .*, starcoder2"),
    "mamba": (_of_family("mamba"), "architecture mamba is not supported yet"),
    "new": (_of_family("new9"), "architecture new9 is not supported yet.*use the model in safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_come_out_wrong_is_refused(case: str, tmp_path: Path) -> None:
    change, says = REFUSED[case]
    file = of_model(_llama(tied=False), "llama")
    change(file)
    path = file.write(tmp_path / "small.gguf")
    with pytest.raises(ModelError, match=says) as raised:
        open_model(str(path))
    assert "\n" not in str(raised.value)
    assert not list((cache_folder() / "models").glob("*/*"))


def test_a_conversion_says_one_line_and_draws_no_bar(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils as theirs

    bar = theirs.tqdm
    lines: list[str] = []
    open_model(str(llama), lines.append)
    assert len(lines) == 1
    assert capfd.readouterr() == ("", "")
    assert theirs.tqdm is bar


def test_what_an_older_version_made_of_a_file_is_made_anew(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("llmnode.models.gguf.convert._VERSION", 1)
        old = open_model(str(llama)).path
    lines: list[str] = []
    new = open_model(str(llama), lines.append)
    assert new.path != old and len(lines) == 1
    assert open_model(str(llama), lines.append).path == new.path and len(lines) == 1


def test_a_folder_that_somebody_deleted_a_part_of_is_made_anew(llama: Path) -> None:
    folder = open_model(str(llama)).path
    (folder / CONFIG_FILE).unlink()
    assert open_model(str(llama)).path == folder


def test_two_at_once_convert_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmnode.models.gguf import convert as ours

    monkeypatch.setattr("llmnode.models.gguf.convert._PATIENCE_S", 0.01)
    convert, may_go_on, lines = ours._convert_file, Event(), [[], []]

    def slowly(*arguments: Any) -> None:
        may_go_on.wait(60)
        convert(*arguments)

    monkeypatch.setattr(ours, "_convert_file", slowly)

    def told(number: int, line: str) -> None:
        lines[number].append(line)
        may_go_on.set()

    with ThreadPoolExecutor() as threads:
        first = threads.submit(open_model, str(llama), partial(told, 0))
        while not list(cache_folder().glob("models/*.lock")):
            assert not first.done()
        second = threads.submit(open_model, str(llama), partial(told, 1))
        assert first.result(60).digest == second.result(60).digest
    assert sorted(map(len, lines)) == [1, 1]
    assert "another process converts small: waiting for it" in lines[0] + lines[1]


def test_what_was_converted_is_what_is_read_later(llama: Path) -> None:
    lines: list[str] = []
    folder = open_model(str(llama))
    weights = folder.path / SINGLE_FILE
    content = weights.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-4], b""):
        weights.write_bytes(damaged)
        lines.clear()
        assert open_model(str(llama), lines.append).digest == folder.digest
        assert weights.read_bytes() == content
        assert "is damaged, and is converted again" in lines[0]
    (folder.path / ours.DIGESTS_FILE).unlink()
    open_model(str(llama))
    os.utime(weights)
    lines.clear()
    open_model(str(llama), lines.append)
    assert lines == [], "it was not changed"


def test_files_whose_digests_begin_alike_are_two(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may make two files for that: a folder has the whole digest in its name."""
    first = open_model(str(llama))
    sha256 = sha256_of(llama)
    other = llama.with_name("other") / llama.name
    other.parent.mkdir()
    of_model(_llama(tied=True), "llama").write(other)
    alike = sha256[:40] + "0" * 24
    monkeypatch.setattr(ours, "sha256_of", lambda file, *_: alike if file == other else sha256)
    assert open_model(str(other)).path != first.path


def test_a_file_that_is_written_while_it_is_converted_is_told(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = ours._convert_file

    def meanwhile(*arguments: Any) -> None:
        convert(*arguments)
        of_model(_llama(tied=True), "llama").write(llama)

    with monkeypatch.context() as patched:
        patched.setattr(ours, "_convert_file", meanwhile)
        with pytest.raises(ModelError, match="was written while it was converted"):
            open_model(str(llama))
    load_span(open_model(str(llama)), Span(0, 1), "sdpa")


def test_disk_space_is_asked_for_by_the_size_of_the_model(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _path: usage._replace(free=16 << 20))
        with pytest.raises(ConfigError, match=r"16 MiB free and the model needs 17 MiB: .* set LLMNODE_CACHE"):
            open_model(str(llama))
    with monkeypatch.context() as patched:
        patched.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
        with pytest.raises(ConfigError, match=r"takes 2 MiB of memory and 1 MiB are free: .* in safetensors"):
            open_model(str(llama))
    load_span(open_model(str(llama)), Span(0, 1), "sdpa")


def test_a_file_that_is_no_gguf_is_told(llama: Path, tmp_path: Path) -> None:
    folder = open_model(str(llama))
    with pytest.raises(ConfigError, match=r"is a file and no GGUF: name the folder"):
        open_model(str(folder.path / SINGLE_FILE))
    renamed = llama.rename(tmp_path / "small")
    assert open_model(str(renamed)).name == "small"
