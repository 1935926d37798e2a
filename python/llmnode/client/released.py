"""A failed call keeps nothing alive: an exception that a caller keeps has frames, and frames have caches.

A cache ends its sessions when nobody refers to it. So the frames of libraries forget their variables when a call fails;
those of the caller's own code stay as they are, for a debugger.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")

_SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
LIBRARIES = frozenset({"contextlib", "llmnode", "torch", "transformers", "trio"})
"""Top packages whose frames may keep the arguments of their calls."""


def releasing(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, whose failures hold none of its arguments, and nothing that it made."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # Any: as of `function`
        before = sys.exception()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            args, kwargs = (), {}
            for each in _related(error, before):
                _forget(each.__traceback__)
            raise

    return call


def _related(error: BaseException, before: BaseException | None) -> Iterator[BaseException]:
    """`error`, its causes, contexts and members, without those that were there `before`."""
    seen: set[int] = {id(before)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _forget(traceback: TracebackType | None) -> None:
    """Clear the frames of functions of libraries. A frame that still runs stays as it is.

    A coroutine may have caught the error and go on, suspended now; clearing its frame would end it.
    """
    while traceback is not None:
        frame = traceback.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in LIBRARIES and not frame.f_code.co_flags & _SUSPENDABLE:
            with suppress(RuntimeError):  # it still runs
                frame.clear()
        traceback = traceback.tb_next
