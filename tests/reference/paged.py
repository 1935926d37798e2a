"""Executors with KV in pages on the CPU. The GPU's own functions are replaced by others that compute the same."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.attention.varlen as torch_varlen
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from llmnode.compute.attention import ATTENTION
from llmnode.compute.own_attention import replace_own_attention
from llmnode.compute.paged_executor import PagedExecutor
from llmnode.compute.pages import PagePool
from llmnode.core.span import Span
from llmnode.models import load
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.load import load_ends, load_span
from llmnode.models.sources.folder import ModelFolder
from reference.small import CONFIGS, KV_TOKENS, Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pytest

    from llmnode.compute.cuda_graphs import Record, Replay

BY_THEMSELVES = {case for case in CONFIGS if case.startswith(("gemma2", "bloom", "falcon-alibi"))}
"""Their attention runs each sequence by itself, since scores have a softcap, or a bias for each position."""
PAGE = 8
"""Short sequences have several pages of this size. The window of small models has the same size."""


def load_paged(
    folder: ModelFolder,
    span: Span,
    *,
    record: Record | None = None,
    flash: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PagedExecutor:
    model = load_span(folder, span, ATTENTION, dtype)
    replace_own_attention(model)
    pool = PagePool(KV_TOKENS, torch.device("cpu"), flash=flash, page=PAGE)
    return PagedExecutor(model, folder.info.hidden_size, pool, record)


def cut_paged(
    folder: ModelFolder,
    edges: Sequence[int],
    *,
    record: Record | None = None,
    flash: bool = False,
) -> Cut:
    spans = [Span(start, end) for start, end in pairwise(edges)]
    executors = [load_paged(folder, span, record=record, flash=flash) for span in spans]
    return Cut(load_ends(folder), list(executors))


def record_by_tracing(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], hidden: torch.Tensor, numbers: torch.Tensor
) -> Replay:
    """A `Record` for a CPU, with the essence of CUDA graphs: Python runs once.

    A replay repeats torch's operations on the same memory. A number that Python has read keeps its value. A number that
    Python would have to read from a tensor cannot be recorded.
    """
    with _Tape() as tape:
        output = function(hidden, numbers)
    return partial(tape.replay, output)


class _Tape(TorchDispatchMode):
    """Notes torch's operations, with the tensors that go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any]] = []  # Any: operations, arguments and results, as torch has them

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # Any: torch's own signature
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} gives Python a number")
        given = (args, kwargs or {})
        made = func(*given[0], **given[1])
        self._steps.append((func, given, made))
        return made

    def replay(self, output: torch.Tensor) -> torch.Tensor:
        """Repeat all operations. Returns the tensor that takes the place of `output`."""
        anew: dict[int, torch.Tensor] = {}  # by those of the recording, which live as long as the tape
        for func, (args, kwargs), made in self._steps:
            named = {name: _with_those(anew, each) for name, each in kwargs.items()}
            results = _tensors(func(*_with_those(anew, args), **named))
            anew.update((id(old), new) for old, new in zip(_tensors(made), results, strict=True))
        return anew[id(output)]


def _with_those(anew: Mapping[int, torch.Tensor], given: Any) -> Any:  # Any: torch's arguments
    """`given` with others in the place of tensors with these ids. torch's functions for trees take most of a test."""
    if isinstance(given, torch.Tensor):
        return anew.get(id(given), given)
    return type(given)(_with_those(anew, each) for each in given) if isinstance(given, tuple | list) else given


def _tensors(made: Any) -> list[torch.Tensor]:  # Any: torch's results
    if isinstance(made, torch.Tensor):
        return [made]
    return [each for part in made for each in _tensors(part)] if isinstance(made, tuple | list) else []


class AsInCapture(TorchDispatchMode):
    """Refuses what a CUDA graph cannot record: copies between devices, and numbers that Python reads."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # Any: torch's own signature
        made = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func.overloadpacket in (aten.to, aten._to_copy, aten.copy_):
            of = args[1] if func.overloadpacket is aten.copy_ else args[0]
            assert made.device == of.device, f"a copy from {of.device} to {made.device}"
        assert torch.Tag.data_dependent_output not in func.tags, f"{func} gives Python a number"
        return made


def varlen_attn(  # noqa: PLR0913  # the parameters are those of torch's varlen_attn
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int | None,
) -> torch.Tensor:
    """torch's `varlen_attn` as documented, without a GPU: causal up to the last key, over pages."""
    assert cu_seq_k is cu_seq_q, "one without the other is refused"
    assert num_splits == 1 or (max_q == 1 and window_size == (-1, -1) and enable_gqa), (
        "else splits are put in wrong places"
    )
    assert window_size[1] == 0 or max_q == 1
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[2])
    begins, outputs = cu_seq_q.tolist(), []
    for row, (used, pages) in enumerate(zip(seqused_k.tolist(), block_table, strict=True)):
        own = query[begins[row] : begins[row + 1]]
        assert len(own) <= max_q and used <= max_k
        keys, values = (states[pages.long()].flatten(0, 1)[:used].transpose(0, 1) for states in (key, value))
        at, looks_at = torch.arange(used - len(own), used)[:, None], torch.arange(used)
        mask = looks_at <= at
        if window_size[0] >= 0:
            mask &= looks_at >= at - window_size[0]
        attended = torch.nn.functional.scaled_dot_product_attention(
            own.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(attended[0].transpose(0, 1))
    assert begins[-1] == len(query)
    return torch.cat(outputs)


def without_numbers(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    """A mode in which `folder` can be read, and tensors can be on a GPU that is not there. They have no numbers.

    Functions that only read numbers, or ask the driver, are replaced.
    """
    mode, read, empty = FakeTensorMode(allow_non_fake_inputs=True), ModelFolder.read, torch.empty
    drawn = blueprint_of(folder)

    def read_shapes(folder: ModelFolder, dtypes: Mapping[str, torch.dtype]) -> Mapping[str, torch.Tensor]:
        with unset_fake_temporarily():
            tensors = read(folder, dtypes)
        return {name: mode.from_tensor(each) for name, each in tensors.items()}

    def not_pinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    def moved(module: torch.nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
        """Replaces torch's own, which requires that nothing else refers to the parameters."""
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[name] = torch.nn.Parameter(move(parameter), requires_grad=False)
            for name, buffer in each._buffers.items():
                each._buffers[name] = None if buffer is None else move(buffer)
        return module

    monkeypatch.setattr(ModelFolder, "read", read_shapes)
    monkeypatch.setattr(load, "check_transparent", lambda *_of_numbers: None)
    monkeypatch.setattr(load, "blueprint_of", lambda _folder: drawn)
    monkeypatch.setattr(torch, "empty", not_pinned)
    monkeypatch.setattr(torch.nn.Module, "_apply", moved)
    if hasattr(torch_varlen, "_select_backend"):  # not in torch 2.11
        flash = torch_varlen._FLASH_ATTENTION_BACKEND
        monkeypatch.setattr(torch_varlen, "_select_backend", lambda *_of_device: flash)
    return mode
