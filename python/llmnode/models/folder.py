"""A model on disk: a folder with `config.json` and safetensors, read tensor by tensor.

Knows no architecture: which tensors belong to which block is `parts.py`'s. Nor where files come from: what is not there
yet is obtained by who opened the folder, when it is read.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from llmnode.core.identity import read_digest
from llmnode.core.model import ModelInfo
from llmnode.errors import ModelError
from llmnode.models.blueprint import kept_blueprint
from llmnode.models.families import FAMILIES
from llmnode.models.identity import folder_weights, identify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

    from llmnode.core.identity import Weights

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_MAPPED_BYTES = 64 << 20
"""Of a file that is read, so much is in memory beside the copies: then it is opened anew."""

Header = dict[str, tuple[str, list[int]]]
"""What a safetensors file says of its tensors: by name, dtype and shape."""


def _nothing_to_obtain(_files: Collection[Path]) -> None:
    """Of a folder that is all there."""


@dataclass(frozen=True)
class ModelFolder:
    """An opened model folder. `files` tells for each tensor name the file that holds it, `dtypes` what it is there.

    `obtain` is called with the files that are about to be read, and returns when they are there.
    """

    path: Path
    name: str
    files: Mapping[str, Path]
    dtypes: Mapping[str, str]
    digest: bytes
    obtain: Callable[[Collection[Path]], None] = _nothing_to_obtain

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def revision(self) -> str:
        """The commit, if it is from the hub; else what stands for its weights."""
        identity = read_digest(self.digest)
        assert identity is not None, "ours are made so"
        return identity.weights.fingerprint.hex()

    @property
    def is_local(self) -> bool:
        """Whether all of it is on this machine."""
        return self.obtain is _nothing_to_obtain

    @cached_property
    def config(self) -> PreTrainedConfig:
        """As transformers, which takes seconds to import, has it. Raises ModelError as `read_config`."""
        return read_config(self.path)

    @cached_property
    def info(self) -> ModelInfo:
        """Raises ModelError if the config does not say how large the model is."""
        if (kept := kept_blueprint(self.config_file)) is not None:
            blocks, hidden_size, context_tokens = len(kept.blocks), kept.hidden_size, kept.context_tokens
        else:
            blocks, hidden_size = self._size("num_hidden_layers"), self._size("hidden_size")
            context_tokens = self._context_tokens()
        # Hidden states travel in fp32 whatever the dtype of the weights, on disk or in memory.
        return ModelInfo(self.name, self.digest, blocks, hidden_size, context_tokens, dtype="float32")

    def _context_tokens(self) -> int:
        family = FAMILIES.get(self.config.model_type)
        return (family and family.context_tokens) or self._size("max_position_embeddings")

    def _size(self, attribute: str) -> int:
        """By the name that transformers gives it; families that name it otherwise (`n_layer`) are mapped there."""
        size = getattr(self.config, attribute, None)
        if not isinstance(size, int):
            raise ModelError(f"{self.config_file} of the family {self.config.model_type!r} has no {attribute}")
        return size

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Copy the named tensors into memory of our own, each as its one of `dtypes`, and no byte of any other tensor.

        A copy, because pages of a mapped file may be dropped by the system and read again in the middle of a step.
        """
        files = {name: self._file_of(name) for name in dtypes}
        self.obtain(sorted(set(files.values())))
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(set(files.values())):
            tensors |= read_tensors(file, {name: dtypes[name] for name in files if files[name] == file})
        return tensors

    def _file_of(self, name: str) -> Path:
        file = self.files.get(name)
        if file is None:
            raise ModelError(f"{self.path} has no tensor {name!r}: the folder is incomplete")
        return file


def read_tensors(file: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """As `ModelFolder.read`, of one file. Raises ModelError if one of them cannot be read."""
    tensors: dict[str, torch.Tensor] = {}
    waiting = deque(dtypes)
    while waiting:
        tensors |= _read_some(file, waiting, dtypes)
    return tensors


def _read_some(file: Path, names: deque[str], dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Copies of the first of `names`, which are removed: at least one, and until enough of the file is mapped."""
    tensors: dict[str, torch.Tensor] = {}
    mapped = 0
    try:
        with safe_open(file, framework="pt") as opened:
            while names and mapped < _MAPPED_BYTES:
                stored = opened.get_tensor(names[0])
                mapped += stored.nbytes
                tensors[names[0]] = stored.to(dtypes[names[0]], copy=True)
                names.popleft()
                del stored  # the map is let go when nothing refers to it
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {names[0]} from {file}: {error}") from error
    return tensors


def open_folder(path: Path, name: str, weights: Weights | None = None) -> ModelFolder:
    """Read config and tensor index. Raises ModelError if the folder is not a whole model.

    Which `weights` it has is found out, by a part of them, unless the caller knows.
    """
    if kept_blueprint(path / CONFIG_FILE) is None:
        read_config(path)
    headers = {shard: read_header(path / shard) for shard in shard_names(path)}
    return ModelFolder(path, name, *index_tensors(path, headers, weights))


def read_config(path: Path) -> PreTrainedConfig:
    """Raises ModelError if there is none, or if transformers does not know it. No code of the folder is ever run."""
    from transformers import AutoConfig

    try:
        family = json.loads((path / CONFIG_FILE).read_text()).get("model_type")
        if family is not None and family not in FAMILIES and not _is_known(family):
            supported = ", ".join(sorted(FAMILIES))
            raise ModelError(f"models of the family {family!r} are not supported; supported are: {supported}")
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return config
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a model folder: {one_line(error)}") from error


def _is_known(family: object) -> bool:
    from transformers import CONFIG_MAPPING

    return family in CONFIG_MAPPING


def shard_names(path: Path) -> list[str]:
    """The folder's safetensors files, by their index. Raises ModelError if that leads out of the folder."""
    if not (path / INDEX_FILE).exists():
        return [SINGLE_FILE]
    try:
        weight_map: dict[str, str] = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / INDEX_FILE} is damaged: {one_line(error)}") from error
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise ModelError(
                f"{path / INDEX_FILE} names the file {name!r}, which is outside of the model: do not use this model"
            )
    return names


def read_header(shard: Path) -> Header:
    """Raises ModelError if there is no such file, or not of safetensors."""
    try:
        with safe_open(shard, framework="pt") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{shard.parent} is not a model folder: {shard.name}: {one_line(error)}") from error


def index_tensors(
    path: Path, headers: Mapping[str, Header], weights: Weights | None = None
) -> tuple[dict[str, Path], dict[str, str], bytes]:
    """The file and the dtype of each tensor, and the model's digest, from the headers of all shards by their names.

    The digest is the identity of a model: peers with other weights, config or tensor layout never meet.
    """
    config = json.loads((path / CONFIG_FILE).read_text())
    index = {tensor: description for header in headers.values() for tensor, description in header.items()}
    files = {tensor: path / shard for shard, header in headers.items() for tensor in header}
    dtypes = {tensor: dtype for tensor, (dtype, _) in index.items()}
    return files, dtypes, identify(config, index, weights or folder_weights(files, index))


def one_line(error: BaseException) -> str:
    """A library's message, which may be a page long, for a message of ours."""
    return " ".join(str(error).split())
