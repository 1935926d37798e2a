"""A GGUF file is converted once, into what transformers reads from it; what would come out wrong is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError
from llmnode.models.cache import cache_folder
from llmnode.models.checkpoint import CONFIG_FILE, SINGLE_FILE
from llmnode.models.parts import load_span
from llmnode.models.source import open_model
from llmnode.models.tokenizer import load_tokenizer
from reference.small import BLOCKS, HIDDEN_SIZE, VOCABULARY, cut, deviation, make_model, session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.reference

ROPE_BASE = 10_000.0


@dataclass
class File:
    """A GGUF file to be written: `values` by key, besides those that every model has; tensors by ggml's names."""

    architecture: str
    values: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_context_length(128)
        writer.add_block_count(BLOCKS)
        writer.add_embedding_length(HIDDEN_SIZE)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(ROPE_BASE)
        for key, value in self.values.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
        for key, text in self.texts.items():
            writer.add_string(key, text)
        _add_tokenizer(writer)
        for name, tensor in self.tensors.items():
            kind = self.quantization if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """As many bytes as the vocabulary of the small models has room for, and a merge."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<unk>", "<s>", "</s>", *list(bytes_to_unicode().values())[: VOCABULARY - 4], "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def of_model(model: Any, architecture: str, **options: Any) -> File:
    """As llama.cpp's converter writes it."""
    file = File(architecture, **options)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            block, stem = stem.removeprefix("model.layers.").split(".", 1)
            ours = f"blk.{block}.{NAMES[stem]}.{kind}"
        else:
            ours = f"{NAMES[stem]}.{kind}"
        array = tensor.numpy()
        if architecture == "llama" and NAMES[stem] in ("attn_q", "attn_k"):  # rotated in pairs, not in halves
            heads = 4 if NAMES[stem] == "attn_q" else 2
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        file.tensors[ours] = np.ascontiguousarray(array)
    return file


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

    # What GGUF files of these families always have, as transformers reads them.
    options: dict[str, Any] = {"attention_bias": False} if case == "llama" else {"use_sliding_window": False}
    original = make_model(case, tied=tied, **({**options, "head_dim": 128} if case == "qwen3" else options))
    file = of_model(original, case, quantization=quantization).write(tmp_path / "Small-Q8.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="float32").eval()
    ids = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(4))
    if quantization is GGMLQuantizationType.F32:
        assert torch.allclose(model(ids).logits, original(ids).logits, atol=1e-4)  # the file is right
    lines: list[str] = []
    folder = open_model(str(file), lines.append)
    assert folder.name == "Small-Q8" and len(folder.revision) == 16
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


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _other_bytes(file: Path) -> None:
    file.write_bytes(b"not a model at all" * 100)


def _noise_in_the_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[40:60] = b"\xff" * 20
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut_short, _cut_in_the_header, _empty, _other_bytes, _noise_in_the_header])
def test_a_damaged_file_is_told_in_a_line(damage: Callable[[Path], None], llama: Path) -> None:
    damage(llama)
    with pytest.raises(ModelError, match=r"cannot convert .*small\.gguf .*: if it is damaged, get it again") as raised:
        open_model(str(llama))
    assert "\n" not in str(raised.value)
    assert not list((cache_folder() / "models").glob("*/*"))


def _of_family(architecture: str) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.architecture = architecture

    return change


REFUSED: dict[str, tuple[Callable[[File], object], str]] = {
    "a part": (lambda file: file.values.update({"split.count": 3}), "is one of 3 parts of a model: merge them"),
    "a tensor less": (lambda file: file.tensors.pop("blk.3.ffn_up.weight"), r"has no usable model\.layers\.3"),
    "scaled": (lambda file: file.texts.update({"llama.rope.scaling.type": "yarn"}), "embeddings scaled by yarn"),
    "factors": (lambda file: file.tensors.update({"rope_freqs.weight": np.ones(8, np.float32)}), "scaled by factors"),
    "bloom": (_of_family("bloom"), "of the family 'bloom': use the model in safetensors"),
    "mamba": (_of_family("mamba"), "'mamba' are not supported; supported are: bloom, cohere"),
    "new": (_of_family("new9"), "architecture new9 is not supported yet.*use the model in safetensors"),
    "a base": (_of_family("starcoder2"), "rotary embeddings of the base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_come_out_wrong_is_refused(case: str, tmp_path: Path) -> None:
    change, says = REFUSED[case]
    file = of_model(_llama(tied=False), "llama")
    change(file)
    if file.architecture == "starcoder2":
        file.values["starcoder2.rope.freq_base"] = 1e6
    path = file.write(tmp_path / "small.gguf")
    with pytest.raises(ModelError, match=says) as raised:
        open_model(str(path))
    assert "\n" not in str(raised.value)
    assert not list((cache_folder() / "models").glob("*/*"))


def test_room_is_asked_for_by_the_size_of_the_model(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patched:
        patched.setattr("llmnode.models.cache.shutil.disk_usage", lambda _path: usage._replace(free=16 << 20))
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
