"""A loader refuses bad requests before it reads a tensor, and reports progress while it reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.core.model import PRECISIONS
from llmnode.core.placement.own_precision import SLOW_PACE
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.models.pace import usual_dtype
from llmnode.models.size import MEMORY_SHARE, PEERS_BYTES, measure_size
from llmnode.models.sources.checkpoint import CONFIG_FILE
from reference.small import BLOCKS, KV_TOKENS, cut, make_model, open_saved, save_model
from reference.test_narrow import rounded_to_4_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.models.size import ModelSize

pytestmark = pytest.mark.reference

SPAN = Span(1, 4)
CASES = ["llama", "gpt2"]
"""One has a blueprint; the other is cut out of transformers."""


class Draws(TorchDispatchMode):
    """Collects the shapes of tensors for which normal numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        if func.overloadpacket is torch.ops.aten.normal_:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_no_numbers_are_drawn_for_weights_that_files_have(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=False)
    with Draws() as draws:
        cut(open_saved(tmp_path), (0, BLOCKS))
    assert draws.shapes == []


@pytest.mark.parametrize(
    ("case", "counts", "named"), [("llama", "num_hidden_layers", "layers"), ("gpt2", "n_layer", "h")]
)
def test_a_model_of_more_blocks_than_its_files_have_is_not_opened(
    case: str, counts: str, named: str, tmp_path: Path
) -> None:
    """Not even for the blocks that are there: the server would announce the model, and move to the others later."""
    save_model(tmp_path, case, tied=False)
    loader = SpanLoader(Wanted(str(tmp_path), device="cpu", kv_tokens=KV_TOKENS), print)
    assert loader.open_model().blocks == BLOCKS
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    for name in config:
        if isinstance(config[name], list) and len(config[name]) == BLOCKS:
            config[name] += config[name][-1:] * 2
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, counts: BLOCKS + 2}))
    names = rf"\S*{named}\.{BLOCKS}\.\S+, .* and \d+ more \(2 blocks have none\)"
    with pytest.raises(ModelError, match=rf"has no tensors for {names}"):
        loader.open_model()


def loader_of(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    report: Callable[[str], None] = print,
    **wanted: Any,  # its own
) -> SpanLoader:
    monkeypatch.setattr("llmnode.models.size.free_bytes", lambda _device: free_bytes + PEERS_BYTES)
    loader = SpanLoader(Wanted(str(path), device="cpu", **{"kv_tokens": KV_TOKENS, **wanted}), report)
    loader.open_model()
    return loader


def kv_and_log(size: ModelSize) -> int:
    return KV_TOKENS * (len(SPAN) * size.kv_token_bytes + size.log_token_bytes)


@pytest.mark.parametrize("precision", [{}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}, {"quant": "int8"}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_span_and_its_kv_must_fit_to_the_byte(
    case: str, precision: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, case, tied=True)
    asked = {"dtype": "float32", "quant": "none", "kv_dtype": "same", **precision}
    dtype = getattr(torch, asked["dtype"])
    size = measure_size(open_saved(tmp_path), dtype, asked["quant"], asked["kv_dtype"])
    needed = len(SPAN) * size.block_bytes + kv_and_log(size)
    assert loader_of(tmp_path, monkeypatch, needed, **asked).load(SPAN).executor.kv_tokens_free() == KV_TOKENS
    short = loader_of(tmp_path, monkeypatch, needed - 1, **asked)
    monkeypatch.setattr("llmnode.compute.load_executor.load_executor", lambda *_asked: pytest.fail("it is read"))
    with pytest.raises(ConfigError, match=r"blocks \[1, 4\) of .* do not fit: .* lower --kv-tokens"):
        short.load(SPAN)


def test_so_must_kv_that_was_asked_for_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama", tied=True)
    free = 100 << 20
    assert loader_of(tmp_path, monkeypatch, free, kv_memory="90%").load(SPAN).executor.kv_tokens_free() > KV_TOKENS
    for amount, why in (("100%", "do not fit: 100 MiB are free"), ("0.001MB", "holds no position of blocks")):
        with pytest.raises(ConfigError, match=why):
            loader_of(tmp_path, monkeypatch, free, kv_memory=amount).load(SPAN)


def test_kv_that_nobody_asked_for_is_as_much_as_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama", tied=True)
    size, said = measure_size(open_saved(tmp_path)), list[str]()
    weights = len(SPAN) * size.block_bytes

    def positions(kv_tokens: int) -> int:
        needed = weights + kv_tokens * (len(SPAN) * size.kv_token_bytes + size.log_token_bytes)
        free = int(needed / MEMORY_SHARE) + 1
        return loader_of(tmp_path, monkeypatch, free, said.append, kv_tokens=None).load(SPAN).executor.kv_tokens_free()

    assert positions(40_000) == 32_768
    assert not any("KV" in line for line in said)
    assert positions(5000) == 4096
    assert any("KV for 4096 positions" in line for line in said)
    with pytest.raises(ConfigError, match="do not fit"):
        loader_of(tmp_path, monkeypatch, weights, kv_tokens=None).load(SPAN)
    one = size.block_bytes + 1024 * (size.kv_token_bytes + size.log_token_bytes)
    assert loader_of(tmp_path, monkeypatch, int(one / MEMORY_SHARE) + 1, kv_tokens=None).fitting_blocks() == 1


def test_after_a_worker_that_was_lost_the_weights_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama", tied=True)
    needed = len(SPAN) * measure_size(open_saved(tmp_path)).block_bytes
    loader = loader_of(tmp_path, monkeypatch, needed, is_announced=True)
    assert loader.load(SPAN).executor.kv_tokens_free() == KV_TOKENS
    with pytest.raises(ConfigError, match=r"their weights take 1: serve fewer --blocks, raise"):
        loader_of(tmp_path, monkeypatch, needed - 1, is_announced=True).load(SPAN)


def test_weights_that_may_need_few_bits_are_looked_at_only_before_they_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded_to_4_bits(make_model("llama", tied=False), centred=False).save_pretrained(tmp_path)
    folder, looks = open_saved(tmp_path), []

    def look(*_folder: object) -> None:
        looks.append(1)

    size, stored = measure_size(folder), measure_size(folder, look=False)
    assert size.block_bytes < stored.block_bytes / 2
    needed = len(SPAN) * size.block_bytes + kv_and_log(size)
    loaded = loader_of(tmp_path, monkeypatch, needed).load(SPAN)
    assert loaded.tensor_bytes <= len(SPAN) * size.block_bytes
    with pytest.raises(ConfigError, match="do not fit"):
        loader_of(tmp_path, monkeypatch, needed - 1).load(SPAN)
    monkeypatch.setattr("llmnode.models.size.found_block_bytes", look)
    loader_of(tmp_path, monkeypatch, len(SPAN) * stored.block_bytes + kv_and_log(stored)).load(SPAN)
    assert not looks


def test_what_is_chosen_for_what_is_free_fits_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama", tied=True)
    size = measure_size(open_saved(tmp_path))
    one = size.block_bytes + KV_TOKENS * (size.kv_token_bytes + size.log_token_bytes)
    for free in range(int(one / MEMORY_SHARE) + 1, BLOCKS * 2 * one, one // 3):
        loader = loader_of(tmp_path, monkeypatch, free)
        fitting = loader.fitting_blocks()
        loader.load(Span(0, fitting))
    assert fitting == BLOCKS
    with pytest.raises(ConfigError, match=r"no block of .* fits: .* lower --kv-tokens or --kv-memory"):
        loader_of(tmp_path, monkeypatch, one).fitting_blocks()


def test_the_precisions_in_which_a_device_can_compute_have_their_blocks_and_a_usual_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama", tied=True)
    size = measure_size(open_saved(tmp_path))
    one = size.block_bytes + KV_TOKENS * (size.kv_token_bytes + size.log_token_bytes)
    loader = loader_of(tmp_path, monkeypatch, int(one / MEMORY_SHARE) + 1, kv_dtype="auto")
    found = {each.precision.name: each for each in loader.candidates(list(PRECISIONS.values()))}
    assert found.keys() == PRECISIONS.keys()
    exact = found["float32"]
    assert (exact.blocks, exact.pace) == (1, 1.0)
    assert found["bfloat16"].blocks > 1, "they take half of the memory"
    assert all(0.0 < each.pace < 1.0 for name, each in found.items() if "nf4" in name or "float16" in name)
    assert loader.fitting_blocks() == 1, "the loader is as it was"
    few = loader_of(tmp_path, monkeypatch, one // 2)
    assert "float32" not in {each.precision.name for each in few.candidates(list(PRECISIONS.values()))}


def test_a_cpu_without_16_bit_instructions_is_not_called_slow_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for instructions in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, instructions, lambda: False)
    save_model(tmp_path, "llama", tied=False)
    names = ("float32", "bfloat16", "float16")
    found = loader_of(tmp_path, monkeypatch, 1 << 30).candidates([PRECISIONS[name] for name in names])
    assert [(each.pace, each.is_emulated) for each in found] == [(1.0, False), (0.4, True), (0.6, True)]
    assert all(each.pace > SLOW_PACE for each in found)


def test_experts_have_no_precision_of_rounded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "mixtral", tied=False)
    found = loader_of(tmp_path, monkeypatch, 1 << 30).candidates(list(PRECISIONS.values()))
    assert {each.precision.quant for each in found} == {"none"}


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), "bfloat16"), ((7, 5), "float32")])
def test_auto_is_bfloat16_on_gpus_that_have_it(
    capability: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert usual_dtype("cuda:0") == dtype
    assert usual_dtype("cpu") == "float32"


def test_a_device_that_runs_out_of_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, "llama", tied=True)

    def load_executor(*_asked: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, as told")

    monkeypatch.setattr("llmnode.compute.load_executor.load_executor", load_executor)
    with pytest.raises(ConfigError, match=r"blocks \[1, 4\) .* 1000 positions do not fit on cpu: .*--blocks.*as told"):
        loader_of(tmp_path, monkeypatch, 1 << 30).load(SPAN)


@pytest.mark.parametrize("quant", ["none", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_told_as_they_are_read(
    case: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmnode.models.weights.read_progress.TOLD_EVERY_S", 0.0)
    save_model(tmp_path, case, tied=True)
    lines: list[str] = []
    loader_of(tmp_path, monkeypatch, 1 << 30, lines.append, quant=quant).load(SPAN)
    assert [line.split(" in ")[0] for line in lines] == [f"read {read} of 3 blocks" for read in (1, 2, 3)]
    assert all(("rounding to int8" in line) == (quant == "int8") for line in lines)
