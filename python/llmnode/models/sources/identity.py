"""Tells which model the files on disk are: `core/identity.py` makes a digest of it.

Weights on the hub are known by their commit, since no peer has all of them, and those of a GGUF file by its SHA-256.
Those in a folder are known by a digest of each tensor, of all of its bytes. A file is read for that once on a machine
(`file_digests.py`). It is no defence against a peer that lies: what a peer says of its own model is its word. But two
honest peers whose models differ in one number do not meet.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from llmnode import _native
from llmnode.core.identity import WEIGHTS_BYTES, Identity, Origin, Weights
from llmnode.errors import ModelError
from llmnode.machine.cache_folder import show_bytes
from llmnode.models.sources.file_digests import TOLD_BYTES, digests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Header = Mapping[str, tuple[str, list[int]]]

_CHUNK_BYTES = 256 << 20
"""A tensor is digested in chunks of this size: the digest of a tensor is that of its chunks' digests."""
TENSORS = "tensors"
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


def folder_weights(
    files: Mapping[str, Path], index: Header, report: Callable[[str], None] = lambda _line: None
) -> Weights:
    """By the tensors in `files`, wherever in these they are: how a model is cut into files does not count.

    Raises ModelError if they cannot be read. `report` is told in a line what takes long.
    """

    def compute(file: Path) -> Mapping[str, str]:
        if (size_bytes := file.stat().st_size) >= TOLD_BYTES:
            report(f"computing the digests of {file.name}, once ({show_bytes(size_bytes)})")
        return tensor_digests(file)

    digests = {file: digests_of(file, TENSORS, compute) for file in sorted(set(files.values()))}
    described = {name: [index[name][0], digests[file][name]] for name, file in files.items()}
    return Weights(Origin.FOLDER, _hash(described)[:WEIGHTS_BYTES])


def tensor_digests(file: Path) -> dict[str, str]:
    """The digest of each tensor in a safetensors file. Raises ModelError if it cannot be read."""
    digests: dict[str, str] = {}
    places = _places(file)
    try:
        with file.open("rb") as opened:
            for name, (start, end) in sorted(places.items(), key=lambda item: item[1]):
                read = hashlib.sha256()
                for offset in range(start, end, _CHUNK_BYTES):
                    opened.seek(offset)
                    length = min(_CHUNK_BYTES, end - offset)
                    if len(chunk := opened.read(length)) < length:
                        raise ModelError(f"{file} is cut short: get it again")
                    read.update(_native.blake3_digest(chunk))
                digests[name] = read.hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {file} ({error.strerror})") from error
    return digests


def tensor_digests_of(file: Path) -> Mapping[str, str]:
    """The same, computed once on a machine for a file that is not written to."""
    return digests_of(file, TENSORS, tensor_digests)


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
