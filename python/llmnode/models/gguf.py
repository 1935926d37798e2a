"""A GGUF file as a model folder: dequantised once, to fp32, into a folder of the cache that every later start maps.

Several processes may start at once, one of them converts. transformers does the reading. What it would leave out
without a word (a tensor, the scaling of rotary embeddings) is refused here.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from llmnode.errors import ConfigError, LlmnodeError, ModelError
from llmnode.models.cache import cache_folder, require_room, show_bytes
from llmnode.models.checkpoint import CONFIG_FILE, SINGLE_FILE
from llmnode.models.damage import one_line
from llmnode.models.families import family_of
from llmnode.models.folder import ModelFolder, open_folder
from llmnode.models.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gguf import GGUFReader
    from transformers import PreTrainedConfig

_MAGIC = b"GGUF"
_UNPROVEN = ("bloom", "falcon")  # they fuse queries, keys and values, in an order that GGUF has its own of
_EXTRA_BYTES = 16 << 20  # config and tokenizer, beside the tensors
_MEMORY_FACTOR = 2.5  # measured on the embedded model: the file's tensors, the model's, and what is being written
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(path: Path) -> bool:
    """By its suffix, so that a damaged one is told as such; else by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


def open_gguf(path: Path, report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """The model in the file `path`, converted first if this machine has not done so yet; its name is the file's.

    `report` is told in a line what takes long. Raises ConfigError if there is no room for it, ModelError if it cannot
    be read: it is damaged, a part of a model, or of a family or with an option that is not supported.
    """
    try:
        sha256 = sha256_of(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return open_converted(path, path.stem, sha256, report)


def open_converted(gguf: Path, name: str, sha256: str, report: Callable[[str], None]) -> ModelFolder:
    """As `open_gguf`, for a file whose SHA-256 (in hex) the caller knows. It is the model's revision."""
    folder = _folder_of(name, sha256)
    if not (folder / CONFIG_FILE).exists():
        require_room(folder.parent, 0)
        with FileLock(f"{folder}.lock"):
            if not (folder / CONFIG_FILE).exists():
                _remove_left_behind(folder)
                with _reading(gguf), _parsed_once():
                    size_bytes = _check(gguf)
                    require_room(folder.parent, size_bytes + _EXTRA_BYTES)
                    _require_memory(gguf, size_bytes)
                    report(f"converting {name} from GGUF to safetensors, once ({show_bytes(size_bytes)})")
                    _convert(gguf, folder)
    return open_folder(folder, name, _revision(sha256))


def is_converted(name: str, sha256: str) -> bool:
    return (_folder_of(name, sha256) / CONFIG_FILE).exists()


def sha256_of(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _folder_of(name: str, sha256: str) -> Path:
    return cache_folder() / "models" / f"{name.replace('/', '--')}-{_revision(sha256)}"


def _revision(sha256: str) -> str:
    return sha256[:16]


def _remove_left_behind(folder: Path) -> None:
    """By who was killed: the lock is ours."""
    for left_behind in folder.parent.glob(f"{glob.escape(folder.name)}.partial-*"):
        shutil.rmtree(left_behind, ignore_errors=True)


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    try:
        yield
    except LlmnodeError:
        raise
    except Exception as error:  # a file that is cut short or changed brings the libraries to raise anything
        raise ModelError(
            f"cannot convert {gguf} ({type(error).__name__}: {one_line(error)}): if it is damaged, get it again; "
            "else use the model in safetensors"
        ) from error


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers has a file parsed four times, and the names of its tensors listed for each part of the model.

    Both take most of a conversion's time: vocabularies are long, and the package parses them number by number.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: object) -> None:
            # A slice of a memmap takes several times as long as one of the array that it is.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    originals = {name: vars(gguf)[name] for name in ("GGUFReader", "get_tensor_name_map")}
    vars(gguf).update(GGUFReader=cache(Reader), get_tensor_name_map=cache(gguf.get_tensor_name_map))
    try:
        yield
    finally:
        vars(gguf).update(originals)


def _check(gguf: Path) -> int:
    """Raises ModelError if we cannot do it right. Returns the bytes of its tensors in fp32."""
    from gguf import GGUFReader
    from transformers import AutoConfig

    reader = GGUFReader(str(gguf))
    if (parts := _value(reader, "split.count") or 1) > 1:
        raise ModelError(f"{gguf} is one of {parts} parts of a model: merge them with `llama-gguf-split --merge`")
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    family_of(_unquantized(config))
    if config.model_type in _UNPROVEN:
        raise ModelError(f"{gguf} is of the family {config.model_type!r}: use the model in safetensors")
    if option := _left_out(reader, config):
        raise ModelError(
            f"{gguf} has {option}, which transformers does not read from GGUF: use the model in safetensors"
        )
    return 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)


def _left_out(reader: GGUFReader, config: Any) -> str | None:  # Any: each family's config has attributes of its own
    """What the file says of rotary embeddings and transformers ignores: another model would come out."""
    architecture = _value(reader, "general.architecture")
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none") or any(tensor.name in _ROPE_TENSORS for tensor in reader.tensors):
        return f"rotary embeddings scaled by {scaling or 'factors'}"
    base = _value(reader, f"{architecture}.rope.freq_base")
    ropes = getattr(config, "rope_parameters", None) or {}
    bases = {rope["rope_theta"] for rope in (ropes, *ropes.values()) if isinstance(rope, dict) and "rope_theta" in rope}
    if base is not None and bases and not any(abs(base - known) < 1e-6 * base for known in bases):
        return f"rotary embeddings of the base {base:g}"
    return None


def _value(reader: GGUFReader, key: str) -> Any:  # Any: a number or a text, as the file has it
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _unquantized(config: PreTrainedConfig) -> PreTrainedConfig:
    """Of what we store, whatever the file was."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _require_memory(gguf: Path, size_bytes: int) -> None:
    needed_bytes = int(_MEMORY_FACTOR * size_bytes)
    if (free := free_bytes()) < needed_bytes:
        raise ConfigError(
            f"to convert {gguf} takes {show_bytes(needed_bytes)} of memory and {show_bytes(free)} are free: "
            "free some, or use the model in safetensors, of which a node reads its part alone"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the folder under another name and rename it: it is either whole or not there."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.partial-"))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # Any: a pair, against its type
            gguf.parent, gguf_file=gguf.name, dtype="float32", local_files_only=True, output_loading_info=True
        )
        model, loading = loaded
        if missing := sorted({*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}):
            # transformers would make them up at random.
            raise ModelError(f"{gguf} has no usable {missing[0]} ({len(missing)} such): use the model in safetensors")
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)  # the embedding again
        save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
        _unquantized(model.config).save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
        ).save_pretrained(partial)
        for file in partial.iterdir():
            file.chmod(0o644)
        partial.chmod(0o755)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
