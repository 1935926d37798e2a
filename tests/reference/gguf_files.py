"""GGUF files of small models, as llama.cpp's converter writes them, and with anything else in their metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from reference.small import BLOCKS, HIDDEN_SIZE, VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

ROPE_BASE = 10_000.0


def _base(architecture: str) -> dict[str, Any]:
    sizes = {
        "context_length": 128,
        "block_count": BLOCKS,
        "embedding_length": HIDDEN_SIZE,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": ROPE_BASE,
    }
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


def byte_tokens() -> dict[str, Any]:
    """The bytes that fit into the vocabulary of the small models, and a merge."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<unk>", "<s>", "</s>", *list(bytes_to_unicode().values())[: VOCABULARY - 4], "ab"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@dataclass
class File:
    """A GGUF file to be written. `values` are added to those that every model has, or replace them; None removes one.

    `tensors` have ggml's names. `types` has the tensors of other types than `quantization`, with their bytes.
    """

    architecture: str
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict, repr=False)
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32
    types: dict[str, GGMLQuantizationType] = field(default_factory=dict)
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE

    @property
    def metadata(self) -> dict[str, Any]:
        everything = {**_base(self.architecture), **byte_tokens(), **self.values}
        return {key: value for key, value in everything.items() if value is not None}

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture, endianess=self.endian)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        for name, tensor in self.tensors.items():
            if (kind := self.types.get(name)) is not None:
                writer.add_tensor(name, tensor, raw_dtype=kind)
                continue
            kind = self.quantization if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":
        writer.kv_data[0].pop(key)
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](key, value)


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
"""ggml's names by Llama's."""


def of_model(model: Any, architecture: str, **options: Any) -> File:
    """The file that llama.cpp's converter would write."""
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
        if architecture == "llama" and NAMES[stem] in ("attn_q", "attn_k"):  # these are rotated in pairs, not halves
            heads = 4 if NAMES[stem] == "attn_q" else 2
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        file.tensors[ours] = np.ascontiguousarray(array)
    return file


def of_any_model(model: Any, architecture: str, **options: Any) -> File:
    """Like `of_model`, for any family: it uses transformers' names, and applies the inverse of its conversions."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    stored = model.state_dict()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    file = File(architecture, **options)
    for ours, theirs in names.items():
        if theirs in tied or theirs not in stored:
            continue
        array = stored[theirs].numpy()
        if architecture.startswith("gemma") and "norm.weight" in ours:
            array = array + 1
        if architecture == "gpt2" and stored[theirs].ndim == 2 and ours.startswith("blk."):
            array = array.T
        if theirs.endswith("gate_up_proj"):  # a tensor of experts
            half = array.shape[1] // 2
            array = array[:, :half] if "gate" in ours else array[:, half:]
        if "ffn_gate_inp_shexp" in ours:
            array = array[0]
        if architecture == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            heads = 4 if ".attn_q." in ours else 2
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        named = ours if ours.endswith((".weight", ".bias")) else f"{ours}.weight"
        file.tensors[named] = np.ascontiguousarray(array)
    return file
