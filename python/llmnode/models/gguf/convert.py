"""A GGUF file as a model folder: dequantised once, to fp32, into a folder of the cache that every later start maps.

If several processes start at once, one of them converts. transformers reads the tensors. The metadata that it would
leave out is read in `config.py` and `tokenizer.py`. If nothing reads a part of it, it is refused or reported.
"""

from __future__ import annotations

import gc
import glob
import json
import math
import os
import shutil
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from llmnode.errors import ConfigError, LlmnodeError, ModelError
from llmnode.machine.cache_folder import cache_folder, check_disk_space, show_bytes
from llmnode.machine.malloc import give_back
from llmnode.machine.memory import free_bytes
from llmnode.models.families import family_of
from llmnode.models.sources.checkpoint import CONFIG_FILE, SINGLE_FILE
from llmnode.models.sources.damage import one_line
from llmnode.models.sources.file_digests import keep, sha256_of
from llmnode.models.sources.folder import ModelFolder, open_folder
from llmnode.models.sources.identity import TENSORS, gguf_weights, tensor_digests, tensor_digests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedConfig

    from llmnode.models.gguf.file import GgufFile
    from llmnode.models.gguf.tokenizer import GgufTokenizer

NOTES_FILE = "left_out.txt"
"""The file in a converted folder that lists the parts of the GGUF file that were left out. No other folder has it."""

DIGESTS_FILE = "digests.json"
"""The digest of each tensor that the conversion wrote."""

_MOST_NAME = 50
_VERSION = 2
"""The version of our conversion: to be raised when its results change, so that files are converted anew."""
_MAGIC = b"GGUF"
_EXTRA_BYTES = 16 << 20  # config and tokenizer, beside the tensors
_MEMORY_FACTOR = 2.5  # measured on the embedded model: the file's tensors, the model's, and the written file
_MOST_NOTES = 10
_PATIENCE_S = 1.0  # before it is told that another process converts


def is_gguf(path: Path) -> bool:
    """Decides by the suffix, so that a damaged file is named as such; without it, by the first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


def open_gguf(path: Path, report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """The model in the file `path`. It is converted first if this machine has not done so yet. It has the file's name.

    `report` gets a line before each slow step. Raises ConfigError if there is no space for it, ModelError if it cannot
    be read: it is damaged, a part of a model, or of a family or with an option that is not supported.
    """
    return open_converted(path, path.stem, sha256_of(path, report), report)


def open_converted(gguf: Path, name: str, sha256: str, report: Callable[[str], None]) -> ModelFolder:
    """Like `open_gguf`, for a file whose SHA-256 (in hex) the caller knows. By it the weights are known."""
    folder = _folder_of(name, sha256)
    if not _is_converted(folder, report):
        check_disk_space(folder.parent, 0)
        with _alone(FileLock(f"{folder}.lock"), name, report):
            if not _is_converted(folder, report):
                _remove_left_behind(folder)
                with _reading(gguf):
                    _convert_file(gguf, name, folder, report)
                    if sha256_of(gguf) != sha256:
                        (folder / CONFIG_FILE).unlink()
                        raise ModelError(f"{gguf} was written while it was converted: run again when it is whole")
                _forget_conversion()
    for line in _notes_of(folder):
        report(f"{name}: {line}")
    return open_folder(folder, name, gguf_weights(sha256))


def _forget_conversion() -> None:
    """Give its memory back. There are cycles in it, and `collection_paused` would freeze them for good."""
    gc.collect()
    give_back()


def is_converted_folder(folder: Path) -> bool:
    return (folder / NOTES_FILE).exists()


def _folder_of(name: str, sha256: str) -> Path:
    """By the whole digest: of a part of it, two files that somebody makes for that could have the same."""
    return cache_folder("models", f"{name.replace('/', '--')[:_MOST_NAME]}-{sha256}-{_VERSION}")


def _is_converted(folder: Path, report: Callable[[str], None]) -> bool:
    """Whether the folder is there, and its tensors are those that the conversion wrote."""
    if not (folder / CONFIG_FILE).exists():
        return False
    try:
        written = json.loads((folder / DIGESTS_FILE).read_text(encoding="utf-8"))
        is_whole = bool(tensor_digests_of(folder / SINGLE_FILE) == written)
    except (OSError, ValueError, ModelError):
        is_whole = False
    if not is_whole:
        report(f"{folder} is damaged, and is converted again")
    return is_whole


def _notes_of(folder: Path) -> list[str]:
    try:
        return (folder / NOTES_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


@contextmanager
def _alone(lock: FileLock, name: str, report: Callable[[str], None]) -> Iterator[None]:
    try:
        lock.acquire(timeout=_PATIENCE_S)
    except Timeout:
        report(f"another process converts {name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_left_behind(folder: Path) -> None:
    """By a process that was killed, or a user who deleted a part of it: the lock is ours."""
    for left_behind in (folder, *folder.parent.glob(f"{glob.escape(folder.name)}.partial-*")):
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


def _convert_file(path: Path, name: str, folder: Path, report: Callable[[str], None]) -> None:
    from llmnode.models.gguf.config import config_of
    from llmnode.models.gguf.file import open_file
    from llmnode.models.gguf.tokenizer import GgufTokenizer

    notes: list[str] = []
    file = open_file(path)
    with _parsed_once(file):
        config = config_of(file, notes)
        family_of(config)
        tokenizer = GgufTokenizer(file.metadata, file.metadata.text("general.architecture", ""), notes)
        if len(tokenizer.tokens) > config.vocab_size:
            raise ModelError(
                f"{path} has {len(tokenizer.tokens)} tokens, of which its embedding has {config.vocab_size}: "
                "get the file again, or use the model in safetensors"
            )
        _check_tensors(file, config)
        size_bytes = 4 * file.elements
        check_disk_space(folder.parent, size_bytes + _EXTRA_BYTES)
        _require_memory(path, size_bytes)
        report(f"converting {name} from GGUF to safetensors, once ({show_bytes(size_bytes)})")
        _convert(file, config, tokenizer, folder, notes)


@contextmanager
def _parsed_once(file: GgufFile) -> Iterator[None]:
    """transformers parses a file anew, and lists its tensors' names anew, for each part of the model.

    Both take most of a conversion's time: vocabularies are long, and the package parses them number by number. It also
    shows a progress bar, which would cut through the lines of a terminal.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as theirs

    originals = {name: vars(gguf)[name] for name in ("GGUFReader", "get_tensor_name_map")}
    progress_bar = vars(theirs)["tqdm"]
    vars(gguf).update(GGUFReader=lambda *_args: file.reader, get_tensor_name_map=cache(gguf.get_tensor_name_map))
    vars(theirs)["tqdm"] = partial(progress_bar, disable=True)
    try:
        yield
    finally:
        vars(gguf).update(originals)
        vars(theirs)["tqdm"] = progress_bar


def _check_tensors(file: GgufFile, config: PreTrainedConfig) -> None:
    """Check that the model consists of these tensors and no others. Raises ModelError before anything is converted.

    transformers would fill missing tensors at random, and leave out those that it has no name for.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    from llmnode.models.gguf.config import ROPE_FACTORS

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(file.metadata.text("general.architecture", ""), TensorProcessor)
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor(config=config.to_dict()))  # type: ignore[no-untyped-call]  # theirs
    names |= {f"{name}.weight": theirs for name, theirs in names.items() if name.endswith("_exps")}
    tensors = file.tensors
    if unused := sorted(tensors.keys() - names.keys() - {ROPE_FACTORS}):
        raise ModelError(
            f"{file.path} has the tensor {unused[0]} ({len(unused)} such), which this model has no place for: "
            "use the model in safetensors"
        )
    found: dict[str, list[list[int]]] = defaultdict(list)
    for name in tensors.keys() & names.keys():
        found[names[name]].append(tensors[name].shape.tolist())
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    expected = {name: list(each.shape) for name, each in model.state_dict().items() if name not in tied}
    if missing := sorted(name for name, shape in expected.items() if not _fits(found[name], shape)):
        raise ModelError(f"{file.path} has no usable {missing[0]} ({len(missing)} such): use the model in safetensors")


def _fits(found: list[list[int]], shape: list[int]) -> bool:
    """Whether a parameter can be made of these tensors: of one, turned perhaps, or of those of gate and up in one."""
    if sum(map(math.prod, found)) != math.prod(shape):
        return False
    return len(found) > 1 or sorted(each for each in found[0] if each > 1) == sorted(each for each in shape if each > 1)


def _require_memory(gguf: Path, size_bytes: int) -> None:
    needed_bytes = int(_MEMORY_FACTOR * size_bytes)
    if (free := free_bytes()) < needed_bytes:
        raise ConfigError(
            f"to convert {gguf} takes {show_bytes(needed_bytes)} of memory and {show_bytes(free)} are free: "
            "free some, or use the model in safetensors, of which a node reads its part alone"
        )


def _convert(
    file: GgufFile, config: PreTrainedConfig, described: GgufTokenizer, folder: Path, notes: list[str]
) -> None:
    """Write the folder under another name and rename it: it is either whole or not there."""
    from safetensors.torch import save_file
    from transformers.utils import logging

    from llmnode.models.gguf.generation import generation_config_of

    logging.disable_progress_bar()
    partly = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.partial-"))
    try:
        tokenizer = described.build()
        model = _load(file, config)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)  # the embedding again
        save_file(tensors, partly / SINGLE_FILE, metadata={"format": "pt"})
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the stored weights are not quantized, unlike the file's
        model.config.save_pretrained(partly)
        generation_config_of(file, model.config, described, notes).save_pretrained(partly)
        tokenizer.save_pretrained(partly)
        notes.extend(f"tokenizer.{name} is not understood and left out" for name in file.metadata.unread("tokenizer."))
        if (more := len(notes) - _MOST_NOTES) > 0:
            notes[_MOST_NOTES:] = [f"{more} more keys are not understood and left out"]
        digests = tensor_digests(partly / SINGLE_FILE)
        (partly / DIGESTS_FILE).write_text(json.dumps(digests), encoding="utf-8")
        (partly / NOTES_FILE).write_text("".join(f"{line}\n" for line in notes), encoding="utf-8")
        for written in partly.rglob("*"):
            written.chmod(0o755 if written.is_dir() else 0o644)
        partly.chmod(0o755)
        os.replace(partly, folder)
        keep(folder / SINGLE_FILE, TENSORS, digests)
    finally:
        shutil.rmtree(partly, ignore_errors=True)


def _load(file: GgufFile, config: PreTrainedConfig) -> Any:  # Any: a model of the config's class
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(  # Any: a pair, against its type
        file.path.parent,
        config=config,
        gguf_file=file.path.name,
        dtype="float32",
        local_files_only=True,
        output_loading_info=True,
    )
    model, loading = loaded
    if missing := sorted({*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}):
        raise ModelError(f"{file.path} has no usable {missing[0]} ({len(missing)} such): use the model in safetensors")
    return model
