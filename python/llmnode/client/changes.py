"""Whether parameters have changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.models.tensors import version_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch


def state_of(
    modules: Mapping[str, torch.nn.Module | None], left_out: torch.nn.Module, names: Collection[str]
) -> list[tuple[int, int, int]]:
    """Another value when a parameter has been changed, added or replaced, but for those of `left_out` and `names`.

    It is asked for at every token, so the hundreds of modules in `left_out` are not visited.
    """
    waiting, state = [modules], []
    while waiting:
        for name, module in waiting.pop().items():
            if module is not None and module is not left_out and name not in names:
                state += [version_of(each) for each in module._parameters.values() if each is not None]
                waiting.append(module._modules)
    return state
