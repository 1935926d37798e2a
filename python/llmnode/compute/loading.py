"""From what a node is asked to hold to an executor that holds it. All that needs torch or transformers is in here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmnode.compute.startup import collection_paused
from llmnode.core.memory import parse_memory
from llmnode.core.model import QUANTS, SAME, Precision
from llmnode.errors import ConfigError
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.models.folder import ModelFolder
    from llmnode.models.size import ModelSize

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a worker is to hold, but for the span, which is chosen when the model is known. As in `NodeConfig`."""

    model: str | None = None
    kv_tokens: int = 32_768
    kv_memory: str | None = None
    kv_dtype: str = SAME
    kv_device: str | None = None
    device: str = AUTO
    dtype: str = "float32"
    quant: str = "none"
    threads: int | None = None


class SpanLoader:
    """The `Loader` port over models on disk. Importing torch, converting and reading take seconds to minutes."""

    def __init__(self, wanted: Wanted, report: Callable[[str], None]) -> None:
        """`report` is told in a line what takes long."""
        self._wanted = wanted
        self._report = report
        self._folder: ModelFolder | None = None

    def open_model(self) -> ModelInfo:
        with collection_paused():
            from llmnode.models.cores import use_threads
            from llmnode.models.source import open_model

            use_threads(self._wanted.threads)
            self._folder = open_model(self._wanted.model, self._report)
        self._wanted = replace(self._wanted, device=_device(self._wanted.device))
        quant, kv_device = _quant(self._wanted, self._folder), _kv_device(self._wanted)
        self._wanted = replace(self._wanted, quant=quant, kv_device=kv_device)
        wanted = self._wanted
        return replace(self._folder.info, dtype=Precision(wanted.dtype, wanted.quant, wanted.kv_dtype).name)

    def fitting_blocks(self) -> int:
        from llmnode.models.memory import free_bytes
        from llmnode.models.size import MEMORY_SHARE

        wanted, folder, size = self._wanted, self._opened, self._size
        free, kv_free = free_bytes(wanted.device), free_bytes(wanted.kv_device or wanted.device)
        if wanted.kv_memory is not None:
            kv = parse_memory(wanted.kv_memory).of(kv_free)
            fitting = size.fitting_blocks_beside(free, kv if wanted.kv_device is None else 0)
        else:
            kv = wanted.kv_tokens * size.kv_token_bytes
            if wanted.kv_device is None:
                fitting = size.fitting_blocks(free, wanted.kv_tokens)
            else:
                fitting = size.fitting_blocks_apart(free, kv_free, wanted.kv_tokens)
        if not fitting:
            apart = "" if wanted.kv_device is None else f", and {kv_free >> 20} for KV on {wanted.kv_device}"
            raise ConfigError(
                f"no block of {folder.name} fits: {free >> 20} MiB are free{apart}, of which a server takes "
                f"{MEMORY_SHARE:.0%}; a block takes {size.block_bytes >> 20} and its KV {kv >> 20}: "
                "end other programs, raise the container's limit, or lower --kv-tokens or --kv-memory"
            )
        return fitting

    def load(self, span: Span) -> Loaded:
        with collection_paused():
            import torch

            from llmnode.compute.executor import load_executor
            from llmnode.compute.kv import KVForm

            wanted, dtype = self._wanted, getattr(torch, self._wanted.dtype)
            kv_tokens = self._kv_tokens(span)
            kv = KVForm(wanted.kv_dtype, None if wanted.kv_device is None else torch.device(wanted.kv_device))
            executor = load_executor(self._opened, span, kv_tokens, dtype, wanted.device, wanted.quant, kv)
        return Loaded(executor, executor.tensor_bytes)

    def _kv_tokens(self, span: Span) -> int:
        """Raises ConfigError if there is not so much memory."""
        wanted = self._wanted
        if wanted.kv_memory is None:
            return wanted.kv_tokens
        from llmnode.models.memory import free_bytes

        free = free_bytes(wanted.kv_device or wanted.device)
        kv_bytes = parse_memory(wanted.kv_memory).of(free)
        return self._size.kv_tokens(free, kv_bytes, len(span), apart=wanted.kv_device is not None)

    @cached_property
    def _size(self) -> ModelSize:
        """Once: of weights in few bits it reads some."""
        import torch

        from llmnode.models.size import measure_size

        wanted = self._wanted
        return measure_size(self._opened, getattr(torch, wanted.dtype), wanted.quant, wanted.kv_dtype, wanted.device)

    @property
    def _opened(self) -> ModelFolder:
        assert self._folder is not None, "the model is opened first"
        return self._folder


def _quant(wanted: Wanted, folder: ModelFolder) -> str:
    if wanted.quant != AUTO:
        assert wanted.quant in QUANTS
        return wanted.quant
    from llmnode.models.parts import found_block_bytes
    from llmnode.models.quantized import fast_quant

    quant = fast_quant(wanted.device)
    is_narrow = quant == "int8" and wanted.dtype == "float32"
    return "none" if is_narrow and found_block_bytes(folder) is not None else quant


def _device(device: str) -> str:
    """Raises ConfigError for a device that torch does not have here."""
    import torch

    if device == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r}: write cpu, cuda or cuda:0") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"--device {device}: torch has no such device here; leave it out, or write cpu")
    return device


def _kv_device(wanted: Wanted) -> str | None:
    """None where the blocks are. Raises ConfigError for any other than the CPU."""
    kv, blocks = wanted.kv_device, wanted.device
    if kv is None or kv == blocks or (kv == "cuda" and blocks.startswith("cuda")):
        return None
    if kv == "cpu":
        return kv
    fix = f", or give --device {kv}" if kv.startswith("cuda") else ""
    raise ConfigError(
        f"--kv-device {kv}: KV is kept where the blocks are, here {blocks}, or on the CPU: leave it out, write cpu{fix}"
    )
