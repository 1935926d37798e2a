"""The work that one batch gives to an executor, and how it is done, in whatever thread or process the executor is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer, Control, Slice
    from llmnode.ports import Executor


@dataclass(frozen=True, slots=True)
class Work:
    """The operations are done in their order, and then all slices in one forward."""

    operations: Sequence[Control]
    slices: Sequence[Slice]


@dataclass(frozen=True, slots=True)
class Done:
    """The results in the order of the `Work`: of each operation its own, of each slice its hidden states."""

    results: Sequence[bool | Exception]
    outputs: Sequence[Buffer | Exception]


def do(executor: Executor, work: Work) -> Done:
    """Raises nothing. Each failure is one operation's or slice's alone, and it has changed nothing."""
    return Done([_apply(executor, each) for each in work.operations], _forward(executor, work.slices))


def failed(work: Work, error: Exception) -> Done:
    """All of the work failed for the same reason."""
    return Done([error] * len(work.operations), [error] * len(work.slices))


def _apply(executor: Executor, operation: Control) -> bool | Exception:
    try:
        return executor.apply(operation)
    except Exception as error:  # noqa: BLE001  it is raised to the caller of the operation
        return error


def _forward(executor: Executor, slices: Sequence[Slice]) -> Sequence[Buffer | Exception]:
    """Compute all in one forward. If that fails, halve it, and so on: that finds the slice which fails."""
    if not slices:
        return []
    try:
        return executor.forward(slices)
    except Exception as error:  # noqa: BLE001  it is raised to the caller of the forward
        if len(slices) == 1:
            return [error]
    half = len(slices) // 2
    return [*_forward(executor, slices[:half]), *_forward(executor, slices[half:])]
