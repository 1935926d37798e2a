"""Makes the executor of a span: reads its blocks, and chooses where its KV is and how it is laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.compute.attention import ATTENTION
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.kv import KVForm
from llmnode.compute.own_attention import replace_own_attention
from llmnode.compute.pages import FLASH_DTYPES, PagePool
from llmnode.core.ids import SessionId
from llmnode.core.operations import Close, Open, Slice
from llmnode.core.span import Span
from llmnode.errors import LlmnodeError, ModelError
from llmnode.models.load import load_span
from llmnode.models.sources.damage import one_line
from llmnode.models.tensors import FLOAT_BYTES
from llmnode.models.weights.read_progress import say_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.sources.folder import ModelFolder

_TRIAL = SessionId(b"trial".ljust(16, b"\0"))


def load_executor(
    folder: ModelFolder,
    span: Span,
    kv_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quant: str = "none",
    kv: KVForm | None = None,
    report: Callable[[str], None] = say_nothing,
) -> SpanExecutor:
    """Read the span's tensors and make its executor. Takes seconds: run it off the event loop.

    Weights have `dtype`, whatever it is on disk, and are on torch's `device`. `quant` is the format of linear layers,
    one of `core.model.QUANTS`. KV has the same dtype and device, unless `kv` says otherwise. `report` gets progress.
    Raises ModelError as `load_span` does, and if the blocks cannot compute.
    """
    in_rust = kv is None or kv.device is None
    model = load_span(folder, span, ATTENTION, dtype, device, quant, in_rust=in_rust, report=report)
    replace_own_attention(model)
    if torch.device(device).type == "cuda" and kv in (None, KVForm()):
        from llmnode.compute.cuda_graphs import CudaGraphs
        from llmnode.compute.paged_executor import PagedExecutor

        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every shape, in 40 ms (pytorch#191576)
        pool = PagePool(kv_tokens, torch.device(device), flash=dtype in FLASH_DTYPES)
        return PagedExecutor(model, folder.info.hidden_size, pool, CudaGraphs(pool.device))
    executor = SpanExecutor(model, folder.info.hidden_size, kv_tokens, device, kv)
    _try_out(executor, folder)
    return executor


def _try_out(executor: SpanExecutor, folder: ModelFolder) -> None:
    """Run one position through the first block. Sizes in a config may fit the weights, but not each other."""
    span = Span(executor.span.start, executor.span.start + 1)
    if not executor.apply(Open(_TRIAL, span, 1)):
        return
    try:
        executor.forward([Slice(_TRIAL, 0, 1, bytes(folder.info.hidden_size * FLOAT_BYTES))])
    except (LlmnodeError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch and transformers may raise anything for sizes that do not fit
        raise ModelError(
            f"the blocks that {folder.config_file} describes cannot compute ({one_line(error)}): get it again"
        ) from error
    finally:
        executor.apply(Close(_TRIAL))
