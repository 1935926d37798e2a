"""From a node's settings to an executor of its span. All code that needs torch or transformers is called from here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.model import AUTO, QUANTS, SAME, Precision
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.serving.kv_memory import parse_memory
from llmnode.errors import ConfigError, ModelError
from llmnode.machine.startup import collection_paused
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.models.size import ModelSize, Place
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.ports import Executor

USUAL_KV_TOKENS = 32_768
"""The default. If it does not fit, fewer in steps of `_KV_STEP`."""
_KV_STEP = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings of a worker, as in `NodeConfig`. The span is chosen later, when the model is known.

    A `dtype`, `quant` or `kv_dtype` that is "auto" becomes the one that suits the device when the model is opened.

    If it `is_announced`, `kv_tokens` are those of a worker that was lost, whatever `kv_memory` is: see
    `SpanLoader.load`.
    """

    model: str | None = None
    kv_tokens: int | None = None
    is_announced: bool = False
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
        """`report` gets a line before each slow step."""
        self._wanted = wanted
        self._report = report
        self._folder: ModelFolder | None = None
        self._sizes: dict[bool, ModelSize] = {}

    def open_model(self) -> ModelInfo:
        with collection_paused():
            from llmnode.machine.threads import use_threads
            from llmnode.models.open_model import open_model
            from llmnode.models.sources.missing import check_blocks

            use_threads(self._wanted.threads)
            self._folder = open_model(self._wanted.model, self._report)
            check_blocks(self._folder)
        wanted = replace(self._wanted, device=device_named(self._wanted.device))
        if wanted.dtype == AUTO:
            from llmnode.models.pace import usual_dtype

            wanted = replace(wanted, dtype=usual_dtype(wanted.device))
        if wanted.kv_dtype == AUTO:
            wanted = replace(wanted, kv_dtype=SAME)
        wanted = replace(wanted, quant=_quant(wanted, self._folder), kv_device=_kv_device(wanted))
        self._wanted = wanted
        return replace(self._folder.info, precision=Precision(wanted.dtype, wanted.quant, wanted.kv_dtype))

    def fitting_blocks(self) -> int:
        from llmnode.models.size import MEMORY_SHARE, find_places

        wanted, places, size = self._wanted, find_places(self._wanted.device, self._wanted.kv_device), self._size()
        fitting = size.fitting_blocks(places, lambda blocks: self._kv_tokens(size, blocks, places))
        if not fitting and not self._is_kv_asked_for:
            fitting = size.fitting_blocks(places, lambda _blocks: _KV_STEP)
        if not fitting:
            free, *elsewhere = (place.free_bytes >> 20 for place in places)
            apart = "" if wanted.kv_device is None else f", and {elsewhere[0]} for KV on {wanted.kv_device}"
            kv = self._kv_tokens(size, 1, places) * (size.kv_token_bytes + size.log_token_bytes)
            raise ConfigError(
                f"no block of {self._opened.name} fits: {free} MiB are free{apart}, of which a server takes "
                f"{MEMORY_SHARE:.0%}; a block takes {size.block_bytes >> 20} MiB and its KV {kv >> 20} MiB: "
                "end other programs, raise the container's limit, or lower --kv-tokens or --kv-memory"
            )
        return fitting

    def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        from llmnode.models.pace import is_emulated, usual_pace

        found: list[Candidate] = []
        for each in precisions:
            wanted = replace(self._wanted, dtype=each.dtype, quant=each.quant, kv_dtype=each.kv_dtype)
            loader = SpanLoader(wanted, self._report)
            loader._folder = self._folder
            with suppress(ConfigError, ModelError):  # no block fits, or the family has none in it
                if pace := usual_pace(self._opened, wanted.device, each):
                    found.append(Candidate(each, loader.fitting_blocks(), pace, is_emulated(wanted.device, each)))
        return found

    def load(self, span: Span) -> Loaded:
        """Load `span`. After a lost worker, the announced KV on a CPU need not fit now, but the weights must.

        KV is written as sessions need it, and by then others may have given back memory that they have now.
        """
        with collection_paused():
            import torch

            wanted, kv_tokens = self._wanted, self._check_memory(span)
            try:
                return self._load(span, kv_tokens)
            except torch.OutOfMemoryError as error:
                name = self._opened.name
                raise ConfigError(
                    f"blocks {span} of {name} with KV for {kv_tokens} positions do not fit on {wanted.device}: "
                    f"serve fewer --blocks, lower --kv-tokens or --kv-memory, end other programs ({error})"
                ) from error

    def load_beside(self, span: Span, held: Executor, kv_tokens: int) -> Loaded | None:
        """See `ModelSize.fits_beside`. KV for `kv_tokens` in more blocks than `held` has takes more than `kv_memory`:
        there is none then. Garbage is collected meanwhile, since sessions make some.

        On a GPU there is never memory for both: its graphs are recorded while nothing
        else is allocated. Nor is there for blocks of transformers in 16 bits, which sets the dtype of the whole process
        while it makes them.
        """
        from llmnode.compute.executor import SpanExecutor
        from llmnode.models.draw_blueprint import blueprint_of
        from llmnode.models.load import sharing_blocks
        from llmnode.models.size import find_places

        wanted = self._wanted
        if wanted.device != "cpu" or (wanted.dtype != "float32" and blueprint_of(self._opened) is None):
            return None
        assert isinstance(held, SpanExecutor)
        if wanted.kv_memory is not None and len(span) > len(held.span):
            return None
        (place,) = find_places(wanted.device)
        if not self._size().fits_beside(place.free_bytes, span, held.span, kv_tokens):
            return None
        with sharing_blocks(held.model):
            return self._load(span, kv_tokens)

    def _load(self, span: Span, kv_tokens: int) -> Loaded:
        import torch

        from llmnode.compute.kv import KVForm
        from llmnode.compute.load_executor import load_executor

        wanted, dtype = self._wanted, getattr(torch, self._wanted.dtype)
        kv = KVForm(wanted.kv_dtype, None if wanted.kv_device is None else torch.device(wanted.kv_device))
        placed = dtype, wanted.device, wanted.quant, kv
        executor = load_executor(self._opened, span, kv_tokens, *placed, self._report)
        size, position_bytes = self._size(look=False), 0
        if wanted.device == "cpu":
            position_bytes = len(span) * size.kv_token_bytes + size.log_token_bytes
        return Loaded(executor, executor.tensor_bytes, position_bytes)

    def _check_memory(self, span: Span) -> int:
        """The number of positions to have KV for. Raises ConfigError if `span` does not fit with it."""
        from llmnode.models.size import KV, MEMORY_SHARE, find_places

        wanted, name = self._wanted, self._opened.name
        places, size = find_places(wanted.device, wanted.kv_device), self._size(look=False)
        kv_tokens = self._kv_tokens(size, len(span), places)
        if not kv_tokens:
            raise ConfigError(f"--kv-memory {wanted.kv_memory} holds no position of blocks {span} of {name}: give more")
        is_lazy = wanted.is_announced and all(place.device == "cpu" for place in places if KV in place.holds)
        if self._is_kv_asked_for:
            if not size.fits(places, span, 0 if is_lazy else kv_tokens):
                self._size().check_memory(places, span, 0 if is_lazy else kv_tokens, name)
            return kv_tokens
        within = [replace(place, free_bytes=int(MEMORY_SHARE * place.free_bytes)) for place in places]
        if size.fits(within, span, kv_tokens):
            return kv_tokens
        size, fewer = self._size(), range(kv_tokens, _KV_STEP, -_KV_STEP)
        kv_tokens = next((each for each in fewer if size.fits(within, span, each)), _KV_STEP)
        size.check_memory(places, span, kv_tokens, name)
        if kv_tokens < USUAL_KV_TOKENS:
            self._report(f"KV for {kv_tokens} positions, as the usual {USUAL_KV_TOKENS} do not fit")
        return kv_tokens

    @property
    def _is_kv_asked_for(self) -> bool:
        return self._wanted.kv_tokens is not None or self._wanted.kv_memory is not None

    def _kv_tokens(self, size: ModelSize, blocks: int, places: Sequence[Place]) -> int:
        wanted = self._wanted
        if wanted.kv_memory is None or wanted.is_announced:
            return wanted.kv_tokens or USUAL_KV_TOKENS
        from llmnode.models.size import KV

        free = next(place.free_bytes for place in places if KV in place.holds)
        return size.kv_tokens(parse_memory(wanted.kv_memory).of(free), blocks)

    def _size(self, *, look: bool = True) -> ModelSize:
        """Once. Without a `look` at weights that may need few bits, which are read for it, it may be less."""
        import torch

        from llmnode.models.size import measure_size

        size = self._sizes.get(True) or self._sizes.get(look)
        if size is None:
            wanted, dtype = self._wanted, getattr(torch, self._wanted.dtype)
            size = measure_size(self._opened, dtype, wanted.quant, wanted.kv_dtype, wanted.device, look=look)
            self._sizes[look] = size
        return size

    @property
    def _opened(self) -> ModelFolder:
        assert self._folder is not None, "the model is opened first"
        return self._folder


def _quant(wanted: Wanted, folder: ModelFolder) -> str:
    if wanted.quant != AUTO:
        assert wanted.quant in QUANTS
        return wanted.quant
    from llmnode.models.load import can_quantize, found_block_bytes
    from llmnode.models.weights.quantized import fast_quant

    quant = fast_quant(wanted.device)
    if quant == "none" or not can_quantize(folder):
        return "none"
    is_narrow = quant == "int8" and wanted.dtype == "float32"
    return "none" if is_narrow and found_block_bytes(folder) is not None else quant


def device_named(device: str) -> str:
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
