"""A model on disk: a folder with `config.json` and safetensors, read tensor by tensor.

Knows no architecture: which tensors belong to which block is `parts.py`'s.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from llmnode.core.model import ModelInfo
from llmnode.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An opened model folder. `files` tells for each tensor name the file that holds it."""

    path: Path
    name: str
    revision: str
    config: PreTrainedConfig
    files: Mapping[str, Path]
    digest: bytes

    @property
    def info(self) -> ModelInfo:
        """Raises ModelError if the config does not say how large the model is."""
        # Hidden states travel in fp32 whatever the dtype of the weights, on disk or in memory.
        return ModelInfo(
            name=self.name,
            digest=self.digest,
            blocks=self._size("num_hidden_layers"),
            hidden_size=self._size("hidden_size"),
            context_tokens=self._size("max_position_embeddings"),
            dtype="float32",
        )

    def _size(self, attribute: str) -> int:
        """By the name that transformers gives it; families that name it otherwise (`n_layer`) are mapped there."""
        size = getattr(self.config, attribute, None)
        if not isinstance(size, int):
            raise ModelError(f"{self.path / CONFIG_FILE} of the family {self.config.model_type!r} has no {attribute}")
        return size

    def read(self, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Copy the named tensors into memory of our own, as `dtype`, and no byte of any other tensor.

        A copy, because pages of a mapped file may be dropped by the system and read again in the middle of a step.
        """
        tensors: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}  # Any: safetensors publishes no type for an open file
            for name in names:
                file = self.files.get(name)
                if file is None:
                    raise ModelError(f"{self.path} has no tensor {name!r}: the folder is incomplete")
                try:
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                    tensors[name] = opened[file].get_tensor(name).to(dtype, copy=True)
                except (OSError, SafetensorError) as error:
                    raise ModelError(f"cannot read {name} from {file}: {error}") from error
        return tensors


def open_folder(path: Path, name: str, revision: str) -> ModelFolder:
    """Read config and tensor index, but no tensor. Raises ModelError if the folder is not a whole model."""
    from transformers import AutoConfig

    try:
        config_text = (path / CONFIG_FILE).read_text()
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        files, index = _read_index(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path} is not a model folder: {error}") from error
    return ModelFolder(path, name, revision, config, files, _digest(name, revision, config_text, index))


def _read_index(path: Path) -> tuple[dict[str, Path], dict[str, tuple[str, list[int]]]]:
    """The file of each tensor, and each tensor's dtype and shape."""
    if (path / INDEX_FILE).exists():
        weight_map: dict[str, str] = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        shards = sorted({path / file for file in weight_map.values()})
    else:
        shards = [path / SINGLE_FILE]
    files: dict[str, Path] = {}
    index: dict[str, tuple[str, list[int]]] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(name)
                files[name] = shard
                index[name] = (view.get_dtype(), view.get_shape())
    return files, index


def _digest(name: str, revision: str, config_text: str, index: Mapping[str, tuple[str, list[int]]]) -> bytes:
    """Identity of the model: peers with another name, revision, config or tensor layout never meet."""
    identity = {"name": name, "revision": revision, "config": json.loads(config_text), "index": index}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()
