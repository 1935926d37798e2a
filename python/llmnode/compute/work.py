"""The work that one batch gives to an executor, and how it is done, in whatever thread or process the executor is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.operations import Buffer, Control, Pass, Slice
    from llmnode.ports import Executor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """The operations are done in their order, then all slices in one forward, then all passes together."""

    operations: Sequence[Control]
    slices: Sequence[Slice]
    passes: Sequence[Pass] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The results in the order of the `Work`: of each operation its own, of each slice and pass its numbers."""

    results: Sequence[bool | Exception]
    outputs: Sequence[Buffer | Exception]
    passed: Sequence[Buffer | Exception] = ()


def do(executor: Executor, work: Work) -> Done:
    """Raises nothing. Each failure is one operation's, slice's or pass's alone, and it has changed nothing."""
    return Done(
        [_apply(executor, each) for each in work.operations],
        _computed(executor.forward, work.slices),
        _computed(executor.run, work.passes),
    )


def failed(work: Work, error: Exception) -> Done:
    """All of the work failed for the same reason."""
    return Done([error] * len(work.operations), [error] * len(work.slices), [error] * len(work.passes))


def _apply(executor: Executor, operation: Control) -> bool | Exception:
    try:
        return executor.apply(operation)
    except Exception as error:  # noqa: BLE001  it is raised to the caller of the operation
        return error


def _computed(compute: Callable[[Sequence[T]], Sequence[Buffer]], parts: Sequence[T]) -> Sequence[Buffer | Exception]:
    """Compute all parts together. If that fails, halve them, and so on: that finds the part which fails."""
    if not parts:
        return []
    try:
        return compute(parts)
    except Exception as error:  # noqa: BLE001  it is raised to the caller of the operation
        if len(parts) == 1:
            return [error]
    half = len(parts) // 2
    return [*_computed(compute, parts[:half]), *_computed(compute, parts[half:])]
