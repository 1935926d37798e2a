"""PEFT's `adapter_names`: another adapter for each row of a batch. PEFT tells its layers by hooks, during a call.

Layers of blocks are not called here, so `block_adapters.py` reads their hooks. Those of the ends are called with one
row at a time, while PEFT means all rows of the batch: they are told the name of that row.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

_KIND = "peft.tuners.lora.model", "_adapter_names_pre_forward_hook"
_NAMES = "adapter_names"
BASE = "__base__"
"""PEFT's name for no adapter."""


def is_of_rows(hook: Any) -> bool:  # Any: whatever somebody has registered
    """Whether this hook of a layer says which adapter each row has."""
    of = getattr(hook, "func", None)
    return (getattr(of, "__module__", ""), getattr(of, "__name__", "")) == _KIND and _NAMES in hook.keywords


def names_of_rows(layer: torch.nn.Module) -> tuple[str, ...] | None:
    """The adapter that each row is to have in a layer of PEFT; None without `adapter_names`."""
    hooks: Any = layer._forward_pre_hooks.values()  # Any: as above
    names = [tuple(each.keywords[_NAMES]) for each in hooks if is_of_rows(each)]
    return names[-1] if names else None


def told_by_row(modules: Mapping[str, torch.nn.Module | None], left_out: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of PEFT in `modules` that have a name for each row, without those in `left_out`."""
    found: list[torch.nn.Module] = []
    waiting = [modules]
    while waiting:
        for module in waiting.pop().values():
            if module is not None and module is not left_out:
                waiting.append(module._modules)
                if module._forward_pre_hooks and names_of_rows(module) is not None:
                    found.append(module)
    return found


@contextmanager
def only_row(layers: Sequence[torch.nn.Module], row: int) -> Iterator[None]:
    """In this context these layers of PEFT are called with this `row` alone."""
    before = [layer._forward_pre_hooks for layer in layers]
    for layer in layers:
        layer._forward_pre_hooks = OrderedDict(
            (number, _of_row(hook, row)) for number, hook in layer._forward_pre_hooks.items()
        )
    try:
        yield
    finally:
        for layer, hooks in zip(layers, before, strict=True):
            layer._forward_pre_hooks = hooks


def _of_row(hook: Any, row: int) -> Any:
    return partial(hook.func, adapter_names=[hook.keywords[_NAMES][row]]) if is_of_rows(hook) else hook
