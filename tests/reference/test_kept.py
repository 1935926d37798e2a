"""A block is quantized once: what is read back is the same to the bit, of the very weights, and never damaged."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from llmnode.compute.load_executor import load_executor
from llmnode.core.span import Span
from llmnode.models import load
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.load import load_span
from llmnode.models.sources.folder import ModelFolder
from llmnode.models.weights import quantized_cache as kept_module
from reference.small import BLOCKS, KV_TOKENS, Cut, cut, open_saved, save_model, session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    State = dict[str, torch.Tensor]

pytestmark = pytest.mark.reference

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
WHOLE = Span(0, BLOCKS)
LOAD = """
import sys
from hashlib import sha256
from pathlib import Path

from llmnode.core.span import Span
from llmnode.models.sources.folder import open_folder
from llmnode.models.load import load_span

folder = open_folder(Path(sys.argv[1]), "small")
print("ready", flush=True)
sys.stdin.readline()
state = load_span(folder, Span(0, folder.info.blocks), "sdpa", quant="int8").blocks.state_dict()
print(sha256(b"".join(each.numpy().tobytes() for each in state.values())).hexdigest())
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_module, "cache_folder", (tmp_path / "cache").joinpath)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    save_model(tmp_path / "model", "llama", tied=True)
    return open_saved(tmp_path / "model")


def _state(
    folder: ModelFolder, quant: str = "nf4", span: Span = WHOLE, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    state: State = load_span(folder, span, "sdpa", dtype, quant=quant).blocks.state_dict()
    return state


def _are_same(one: State, other: State) -> bool:
    """Whether they are equal to the bit, and in memory order."""
    return {name: _described(each) for name, each in one.items()} == {
        name: _described(each) for name, each in other.items()
    }


def _described(tensor: torch.Tensor) -> object:
    numbers = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, tensor.stride(), numbers


def _files(cache: Path) -> list[Path]:
    return sorted(file for file in cache.rglob("*") if not file.is_dir())


def _forbidden(*_args: object) -> NoReturn:
    raise AssertionError("it is kept")


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on no weights are quantized, nor read from a model."""

    def patch() -> None:
        monkeypatch.setattr(load, "quantize_block", _forbidden)
        monkeypatch.setattr(ModelFolder, "read", _forbidden)

    return patch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "bloom", "falcon-new", "gemma2"])
def test_a_second_load_quantizes_nothing_and_is_the_same_to_the_bit(
    case: str, quant: str, dtype: torch.dtype, tmp_path: Path, forbid: Callable[[], None]
) -> None:
    save_model(tmp_path / "model", case, tied=True)
    folder = open_saved(tmp_path / "model")
    first = cut(folder, (0, BLOCKS), dtype, quant=quant)
    forbid()
    second = Cut(first.ends, [load_executor(folder, WHOLE, KV_TOKENS, dtype, quant=quant)])
    states = [each.executors[0].model.blocks.state_dict() for each in (first, second)]
    assert _are_same(*states)
    outputs = [each.forward({session(0): TOKENS})[session(0)] for each in (first, second)]
    assert torch.equal(*outputs)


def test_of_other_blocks_nothing_is_read(
    folder: ModelFolder, cache: Path, forbid: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    whole = _state(folder)
    for file in _files(cache):
        if file.name not in ("1.safetensors", "2.safetensors"):
            file.write_bytes(b"")
    forbid()
    part = _state(folder, span=Span(1, 3))
    assert _are_same(part, {f"{int(name[0]) - 1}{name[1:]}": whole[name] for name in whole if name[0] in "12"})
    assert not caplog.messages


def test_what_is_kept_of_a_model_on_the_hub_is_not_downloaded_for(
    folder: ModelFolder, forbid: Callable[[], None], cache: Path
) -> None:
    there, elsewhere = replace(folder, obtain=lambda _files: None), replace(folder, obtain=_forbidden)
    quantized = _state(there)
    forbid()
    for file in set(folder.files.values()):
        file.unlink()
    assert _are_same(_state(elsewhere), quantized)


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _zeros(file: Path) -> None:
    """Fills the file with zeros, as after a power loss."""
    file.write_bytes(bytes(file.stat().st_size))


def _a_bit_of_the_last_tensor(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _noise_in_the_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[40:60] = b"\xff" * 20
    file.write_bytes(content)


def _a_long_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 7 + b"\x7f" + bytes(100))


def _resaved(change: Callable[[State], State]) -> Callable[[Path], None]:
    """By somebody who says the same of it, the checksum included."""

    def damage(file: Path) -> None:
        with safe_open(file, "pt") as opened:
            said = opened.metadata()
        tensors = change(load_file(file))
        file.unlink()
        save_file(tensors, file, said)

    return damage


def _runs_when_unpickled(file: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return os.mkdir, (f"{file}.ran",)

    file.write_bytes(pickle.dumps(Runs()))


DAMAGES = {
    "cut short": _cut_short,
    "empty": _empty,
    "zeros": _zeros,
    "a bit": _a_bit_of_the_last_tensor,
    "noise in the header": _noise_in_the_header,
    "a long header": _a_long_header,
    "other numbers": _resaved(lambda state: {name: each + 1 for name, each in state.items()}),
    "other shapes": _resaved(lambda state: {name: each.repeat(*[2] * each.ndim) for name, each in state.items()}),
    "other dtypes": _resaved(lambda state: {name: each.double() for name, each in state.items()}),
    "a tensor more": _resaved(lambda state: state | {"more": torch.ones(3)}),
    "a tensor less": _resaved(lambda state: dict(list(state.items())[1:])),
    "a pickle": _runs_when_unpickled,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_told_and_made_anew(
    damage: str, folder: ModelFolder, cache: Path, forbid: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    quantized = _state(folder)
    DAMAGES[damage](_files(cache)[3])
    assert _are_same(_state(folder), quantized)
    (line,) = caplog.messages
    assert line.startswith("block 3 of small is quantized anew, as what is kept of it is no good: ")
    assert "\n" not in line
    forbid()
    assert _are_same(_state(folder), quantized)
    assert len(_files(cache)) == BLOCKS


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_file_is_left_alone(make: Callable[[Path], None], folder: ModelFolder, cache: Path) -> None:
    quantized = _state(folder)
    file = _files(cache)[0]
    file.unlink()
    make(file)
    assert _are_same(_state(folder), quantized)


def _of_another_block(folder: ModelFolder, cache: Path, _patch: pytest.MonkeyPatch) -> None:
    files = _files(cache)
    shutil.copy(files[1], files[0])


def _of_another_bitsandbytes(_folder: ModelFolder, _cache: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("importlib.metadata.version", lambda _distribution: "99")


def _of_another_format(_folder: ModelFolder, _cache: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept_module, "_FORMAT", 99)


@pytest.mark.parametrize("change", [_of_another_block, _of_another_bitsandbytes, _of_another_format])
def test_what_was_made_from_something_else_is_not_read_but_replaced(
    change: Callable[[ModelFolder, Path, pytest.MonkeyPatch], None],
    folder: ModelFolder,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    forbid: Callable[[], None],
) -> None:
    _state(folder)
    files = _files(cache)
    change(folder, cache, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(kept_module, "cache_folder", (cache / "another").joinpath)
        expected = _state(folder)
    shutil.rmtree(cache / "another")
    assert _are_same(_state(folder), expected)
    assert _files(cache) == files
    forbid()
    assert _are_same(_state(folder), expected)


def test_each_precision_has_its_own(folder: ModelFolder, cache: Path, forbid: Callable[[], None]) -> None:
    precisions = [(quant, dtype) for quant in ("int8", "nf4") for dtype in (torch.float32, torch.bfloat16)]
    quantized = [_state(folder, quant, dtype=dtype) for quant, dtype in precisions]
    assert len(_files(cache)) == len(precisions) * BLOCKS
    forbid()
    for (quant, dtype), expected in zip(precisions, quantized, strict=True):
        assert _are_same(_state(folder, quant, dtype=dtype), expected)


def test_unquantized_blocks_are_not_kept(folder: ModelFolder, cache: Path) -> None:
    _state(folder, "none")
    assert not cache.exists()


def test_without_a_place_a_model_is_loaded_all_the_same(
    folder: ModelFolder, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmnode")
    quantized = _state(folder)
    shutil.rmtree(cache)
    cache.write_text("not a folder")  # where root, too, may not write
    caplog.clear()
    assert _are_same(_state(folder), quantized)
    (line,) = caplog.messages
    assert line.startswith("quantized blocks of small are not kept: ")


def test_a_disk_that_fills_up_is_told_once_and_nothing_half_written_stays(
    folder: ModelFolder, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = 0

    def save(_state: State, file: Path, _said: object) -> None:
        nonlocal tried
        tried += 1
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    caplog.set_level("INFO", "llmnode")
    with monkeypatch.context() as patched:
        patched.setattr(kept_module, "save_file", save)
        quantized = _state(folder)
    assert (tried, _files(cache)) == (1, [])
    assert [line for line in caplog.messages if "No space left" in line] == caplog.messages[-1:]
    assert _are_same(_state(folder), quantized)


def test_what_does_not_fit_is_not_kept(
    folder: ModelFolder, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmnode")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=200_000))
    _state(folder)
    assert not _files(cache)
    (line,) = caplog.messages
    assert "are too much for" in line and "set LLMNODE_CACHE to another disk" in line


def test_the_longest_unused_goes_first_and_what_is_not_ours_stays(
    folder: ModelFolder, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, forbid: Callable[[], None]
) -> None:
    _state(folder)
    (ours,) = (cache / "quantized").iterdir()
    kept_bytes = sum(file.stat().st_size for file in _files(cache))
    (ours / ".tmpAbCdE1").write_bytes(b"left behind by who was killed")
    theirs = [ours / "notes", cache / "quantized" / "their-model" / "0.safetensors"]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"1")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=4 * kept_bytes))
    save_model(tmp_path / "small", "llama", tied=True, num_hidden_layers=3)
    small = open_saved(tmp_path / "small")
    _state(small, span=Span(0, 3))
    assert {file.parent for file in _files(cache)} == {file.parent for file in theirs}, "it may be in use"
    os.utime(ours, (0, 0))
    expected = _state(small, span=Span(0, 3))
    kept = set(_files(cache))
    assert set(theirs) < kept and len(kept) == len(theirs) + 3
    forbid()
    assert _are_same(_state(small, span=Span(0, 3)), expected)


def test_threads_at_once_have_the_same(folder: ModelFolder, cache: Path, forbid: Callable[[], None]) -> None:
    barrier, states = threading.Barrier(3), list[dict[str, torch.Tensor]]()

    def load() -> None:
        barrier.wait()
        states.append(_state(folder))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_files(cache)) == BLOCKS
    forbid()
    assert all(_are_same(state, _state(folder)) for state in states) and len(states) == 3


def test_processes_at_once_have_the_same(folder: ModelFolder, cache: Path, blueprints: Path) -> None:
    blueprint_of(folder)  # else each would import transformers for it
    shutil.copytree(blueprints / "blueprints", cache / "blueprints")
    environment = {**os.environ, "LLMNODE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, str(folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    for each in both:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in both:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    lines = [each.communicate()[0] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert len(set(lines)) == 1
    assert len(_files(cache / "quantized")) == BLOCKS
