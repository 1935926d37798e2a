"""The differences between the versions of transformers that a client works with. They are here, and nowhere else.

5.24 gave a cache the name `cache` in arguments and outputs; before, it was `past_key_values`. Since 5.23 a choice of
hidden states counts as the whole list does; before, it counted without the first one, and is refused here. This module
looks for the features of the library, and not at its version.
"""

from __future__ import annotations

from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import output_capturing

from llmnode.client.adopted import PREFIXES
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_OLDER = "past_key_values"
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else _OLDER
"""The name of a cache in the installed transformers: among the arguments of `generate`, and in outputs."""

CHOOSES_STATES = hasattr(output_capturing, "selected_hidden_states")
"""Whether single hidden states can be chosen."""


def cache_of(output: object) -> Any:  # Any: a cache of any kind, or None
    """The cache that came with an output."""
    return getattr(output, CACHE, None)


def takes_cache_of_generate(forward: Callable[P, T]) -> Callable[P, T]:
    """Lets a forward, whose parameter is `cache`, also take it by the name that the installed `generate` uses.

    A call with a cache by each name raises ConfigError. transformers would leave out the older one, and PEFT brings
    keys and values by it.
    """

    @wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(CACHE)
        if kwargs.get("cache") is not None and kwargs.get(_OLDER) is not None:
            raise ConfigError(f"there are two caches, `cache` and `{_OLDER}`: pass one. {PREFIXES}")
        return forward(*args, **kwargs)

    return call


def named_for_generate(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate`, with `cache` by the name that the installed one uses."""
    return {CACHE if name == "cache" else name: value for name, value in options.items()}


def chosen_indices(asked: Any, embedding: Any, count: int) -> frozenset[int]:  # Any: whatever a config says
    """The indices, of `count` hidden states, that `output_hidden_states` chooses. It must ask for some.

    Raises TypeError for a value that is no choice. Raises ConfigError if the installed transformers reads it otherwise.
    """
    every = frozenset(range(count))
    if not CHOOSES_STATES:
        if not isinstance(asked, int):
            raise ConfigError(f"output_hidden_states is {asked!r}: give True or False (or update transformers)")
        return every
    selected = output_capturing.selected_hidden_states(asked)
    if selected is None:
        return every
    return frozenset(output_capturing.resolve_hidden_states_indices(embedding, selected, count))
