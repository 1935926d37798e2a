"""Tells which model the files on disk are: `core/identity.py` makes a digest of it.

Weights on the hub are known by their commit, since no peer has all of them, and those of a GGUF file by its SHA-256.
Those in a folder are known by a fingerprint of the numbers: of all of them if there are few, else of windows all over
the tensors. Training, merging, pruning and another dtype change numbers everywhere, and so the fingerprint. It can miss
a change of a few numbers in a large model. It is no defence against a peer that lies about its own model.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from llmnode import _native
from llmnode.core.identity import WEIGHTS_BYTES, Identity, Origin, Weights
from llmnode.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Header = Mapping[str, tuple[str, list[int]]]

SAMPLED_BYTES = 256 << 20
"""A model of no more is read whole, which takes a tenth of a second once the files are in memory. For a larger one this
much is read, or a window of each tensor."""
WINDOW_BYTES = 64 << 10
"""About as fast to read from a disk as less: some 4,000 of them take a second from a cold one without moving parts."""
_LENGTH_BYTES = 8  # of a safetensors file's header, before it

_NOT_COUNTED = frozenset(
    {
        # its authors, and how it is to be loaded
        *("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype"),
        *("_attn_implementation", "attn_implementation", "use_cache", "torchscript", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "gradient_checkpointing"),
        # training
        *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
        *("residual_dropout", "embedding_dropout", "dropout", "layerdrop", "classifier_dropout"),
        *("router_aux_loss_coef", "router_jitter_noise", "finetuning_task", "problem_type"),
        # labels, and settings of `generate`: each client has its own
        *("id2label", "label2id", "num_labels", "task_specific_params"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("max_length", "min_length", "max_new_tokens", "do_sample", "num_beams", "temperature", "top_k", "top_p"),
        *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping", "num_return_sequences"),
    }
)
"""Keys of config.json from which no number that a block computes follows, at the top of it."""


def hub_weights(commit: str) -> Weights:
    """`commit` is in hex, as the hub names it."""
    return Weights(Origin.HUB, bytes.fromhex(commit))


def gguf_weights(sha256: str) -> Weights:
    """The weights of a GGUF file, by its SHA-256 in hex."""
    return Weights(Origin.GGUF, bytes.fromhex(sha256))


def identify(config: Mapping[str, Any], index: Header, weights: Weights) -> bytes:  # Any: JSON
    """A model's digest. `index` has every tensor's dtype and shape."""
    counted = {key: value for key, value in config.items() if key not in _NOT_COUNTED}
    layout = {name: shape for name, (_, shape) in index.items()}
    return Identity(weights, _hash(layout), _hash(_plain(counted))).digest


def folder_weights(files: Mapping[str, Path], index: Header) -> Weights:
    """By the tensors in `files`, wherever in these they are: how a model is cut into files does not count.

    Raises ModelError if they cannot be read.
    """
    places = {file: _places(file) for file in sorted(set(files.values()))}
    total_bytes = sum(end - start for name, file in files.items() for start, end in [places[file][name]])
    windows = None if total_bytes <= SAMPLED_BYTES else max(1, SAMPLED_BYTES // WINDOW_BYTES // len(files))
    digests: dict[str, str] = {}
    for file, tensors in places.items():
        try:
            with file.open("rb", buffering=0) as opened:
                for name in sorted(name for name, at in files.items() if at == file):
                    read = hashlib.sha256()
                    for offset, length in _windows(name, *tensors[name], windows):
                        opened.seek(offset)
                        read.update(_native.blake3_digest(opened.read(length)))
                    digests[name] = read.hexdigest()
        except OSError as error:
            raise ModelError(f"cannot read {file} ({error.strerror})") from error
    described = {name: [index[name][0], digest] for name, digest in digests.items()}
    return Weights(Origin.FOLDER, _hash(described)[:WEIGHTS_BYTES])


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends in it."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file} ({error})") from error
    data = _LENGTH_BYTES + length
    named = {name: said["data_offsets"] for name, said in header.items() if name != "__metadata__"}
    return {name: (data + start, data + end) for name, (start, end) in named.items()}


def _windows(name: str, start: int, end: int, count: int | None) -> Iterator[tuple[int, int]]:
    """Offset and length of each part of a tensor to read. In a large model, its name places `count` windows."""
    size = end - start
    if count is None or size <= count * WINDOW_BYTES:
        for offset in range(start, end, SAMPLED_BYTES):
            yield offset, min(SAMPLED_BYTES, end - offset)
        return
    for number in range(count):
        at = int.from_bytes(hashlib.sha256(f"{number} {name}".encode()).digest()[:8], "big")
        yield start + at % (size - WINDOW_BYTES + 1), WINDOW_BYTES


def _hash(value: Any) -> bytes:  # Any: JSON
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _plain(value: Any) -> Any:  # Any: JSON
    """With one form for numbers that are equal: 10000 and 10000.0 are two programs' ways to write one."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value
