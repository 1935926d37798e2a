"""A model on disk: a folder with `config.json` and safetensors, read tensor by tensor.

Knows no architecture: which tensors belong to which block is `load.py`'s. It does not know either where files come
from: the opener of the folder obtains missing files when they are read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from llmnode.core.identity import read_digest
from llmnode.core.model import ModelInfo
from llmnode.errors import ModelError
from llmnode.models.blueprint import kept_blueprint
from llmnode.models.context import context_of
from llmnode.models.families import FAMILIES, family_of
from llmnode.models.sources.checkpoint import (
    ADAPTER_FILE,
    CONFIG_FILE,
    check_counts,
    check_options,
    explain_lack,
    names_in,
    shard_names,
    weights_file,
)
from llmnode.models.sources.damage import one_line, read_json, what_is_wrong
from llmnode.models.sources.file_digests import stamp_of
from llmnode.models.sources.identity import folder_weights, identify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

    from llmnode.core.identity import Weights
    from llmnode.models.sources.file_digests import Stamp

_MAPPED_BYTES = 64 << 20
"""A file is opened anew after this many bytes, which are in memory beside the copies."""

Header = dict[str, tuple[str, list[int]]]
"""The dtype and shape of each tensor in a safetensors file, by its name."""

_FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of weights. Others are those of models that were quantized, whose scales no config tells us to apply."""


def _nothing_to_obtain(_files: Collection[Path]) -> None:
    """The `obtain` of a folder that is all there."""


@dataclass(frozen=True)
class ModelFolder:
    """An opened model folder. `files` has the file of each tensor, by its name, `dtypes` its dtype there.

    `obtain` is called with the files that will be read next, and returns when they are there.
    """

    path: Path
    name: str
    files: Mapping[str, Path]
    dtypes: Mapping[str, str]
    digest: bytes
    obtain: Callable[[Collection[Path]], None] = _nothing_to_obtain
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    """Those that files had before the digest was computed of them."""

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def revision(self) -> str:
        """The commit, if it is from the hub; else a fingerprint of its weights."""
        identity = read_digest(self.digest)
        assert identity is not None, "ours are made so"
        return identity.weights.fingerprint.hex()

    @property
    def is_local(self) -> bool:
        """Whether all of it is on this machine."""
        return self.obtain is _nothing_to_obtain

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The config as transformers, which takes seconds to import, has it. Raises ModelError as `read_config`.

        Its `name_or_path`, which adapters keep as the name of their base, is the model's name and no path.
        """
        config = read_config(self.path)
        config.name_or_path = self.name
        return config

    @cached_property
    def info(self) -> ModelInfo:
        """Raises ModelError if the config does not say how large the model is."""
        if (kept := kept_blueprint(self.config_file)) is not None:
            blocks, hidden_size, context = len(kept.blocks), kept.hidden_size, kept.context
        else:
            blocks, hidden_size = self._size("num_hidden_layers"), self._size("hidden_size")
            context = context_of(self.config, FAMILIES.get(self.config.model_type))
        # Hidden states travel in fp32 whatever the dtype of the weights, on disk or in memory.
        return ModelInfo(self.name, self.digest, blocks, hidden_size, context.tokens, context_reason=context.reason)

    def _size(self, attribute: str) -> int:
        """By the name that transformers gives it; families that name it otherwise (`n_layer`) are mapped there."""
        size = getattr(self.config, attribute, None)
        if not isinstance(size, int) or size < 1:
            raise ModelError(f"{self.config_file} has no {attribute} that a model can have: get it again")
        return size

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Copy the named tensors into memory of our own, each as its one of `dtypes`, and no byte of any other tensor.

        A copy, because pages of a mapped file may be dropped by the system and read again in the middle of a step.
        """
        files = {name: self._file_of(name) for name in dtypes}
        self._check_floats(dtypes)
        self.obtain(sorted(set(files.values())))
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(set(files.values())):
            tensors |= read_tensors(file, {name: dtypes[name] for name in files if files[name] == file})
        self._check_unchanged(files.values())
        return tensors

    def _check_unchanged(self, files: Iterable[Path]) -> None:
        """A folder may be saved into while a node runs: what is read then is not what the digest says."""
        for file in sorted(set(files) & self.stamps.keys()):
            if stamp_of(file) != self.stamps[file]:
                raise ModelError(f"{file} has been written since this model was opened: start again to serve it anew")

    def _file_of(self, name: str) -> Path:
        file = self.files.get(name)
        if file is None:
            raise ModelError(f"{self.path} has no tensor {name!r}: the folder is incomplete")
        return file

    def _check_floats(self, names: Collection[str]) -> None:
        if (other := next((name for name in names if self.dtypes[name] not in _FLOATS), None)) is not None:
            raise ModelError(
                f"{self.files[other]} holds {other} as {self.dtypes[other]}, and {CONFIG_FILE} has no quantization: "
                f"get the model in one of {', '.join(_FLOATS)}"
            )


def read_tensors(file: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Like `ModelFolder.read`, for one file. Raises ModelError if one of them cannot be read."""
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


def open_folder(
    path: Path, name: str, weights: Weights | None = None, report: Callable[[str], None] = lambda _line: None
) -> ModelFolder:
    """Read config and tensor index. Raises ModelError unless it is a whole model that we can run.

    The identity `weights` is computed from all of the weights, once on a machine, unless the caller knows it. `report`
    is told in a line what takes long.
    """
    try:
        names = names_in(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    config = open_config(path, str(path), names)
    file = weights_file(config, lambda each: (path / each).is_file())
    if file is None:
        raise no_model(path, str(path), names)
    shards = shard_names(path, file)
    stamps = {path / shard: stamp_of(path / shard) for shard in shards if (path / shard).exists()}
    headers = {shard: read_header(path / shard) for shard in shards}
    return ModelFolder(path, name, *index_tensors(path, headers, weights, report), stamps=stamps)


def open_config(path: Path, name: str, names: Collection[str]) -> dict[str, Any]:
    """The config of the folder `path`, which has files of these `names`. Messages call it `name`.

    Raises ModelError unless we can run its model.
    """
    if CONFIG_FILE not in names:
        raise no_model(path, name, names)
    config = read_json(path / CONFIG_FILE)
    check_options(path / CONFIG_FILE, config, names)
    if kept_blueprint(path / CONFIG_FILE) is None:
        family_of(read_config(path))
    return config


def no_model(path: Path, name: str, names: Collection[str]) -> ModelError:
    """The error for a folder without a config or weights that we can use. Its other files decide the advice."""
    lack = explain_lack(sorted(names), lambda: read_json(path / ADAPTER_FILE).get("base_model_name_or_path"))
    return ModelError(f"{name} is not a model folder: it {lack}")


def read_config(path: Path) -> PreTrainedConfig:
    """Raises ModelError if there is none, or if transformers does not know it. No code of the folder is ever run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    written = read_json(path / CONFIG_FILE)
    check_counts(path / CONFIG_FILE, written)
    family = written.get("model_type")
    if isinstance(family, str) and family not in FAMILIES and family not in CONFIG_MAPPING:
        supported = ", ".join(sorted(FAMILIES))
        code = ", needs code of its own (auto_map), which llmnode never runs" if "auto_map" in written else ""
        raise ModelError(f"models of the family {family!r}{code} are not supported; supported are: {supported}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for strange values of a config
        raise ModelError(
            f"{path} is not a model folder: transformers takes no such {CONFIG_FILE} ({one_line(error)}): get it again"
        ) from error
    return config


def read_header(shard: Path) -> Header:
    """The header of a shard. Raises ModelError with advice if there is no such file, or it is not safetensors."""
    try:
        with safe_open(shard, framework="pt") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
    except (OSError, SafetensorError) as error:
        why = what_is_wrong(shard) or f"is not of safetensors, or damaged ({one_line(error)}): download it again"
        raise ModelError(f"{shard.parent} is not a model folder: {shard.name} {why}") from error


def index_tensors(
    path: Path,
    headers: Mapping[str, Header],
    weights: Weights | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> tuple[dict[str, Path], dict[str, str], bytes]:
    """The file and the dtype of each tensor, and the model's digest, from the headers of all shards by their names.

    The digest is the identity of a model: peers with other weights, config or tensor layout never meet.
    """
    config = read_json(path / CONFIG_FILE)
    index = {tensor: description for header in headers.values() for tensor, description in header.items()}
    files = {tensor: path / shard for shard, header in headers.items() for tensor in header}
    dtypes = {tensor: dtype for tensor, (dtype, _) in index.items()}
    return files, dtypes, identify(config, index, weights or folder_weights(files, index, report))
