"""A call of transformers' `generate`: the sessions that it opens end with it. Some of its options are refused."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmnode.client.adopted import QUANTIZED, sessions_behind
from llmnode.client.versions import CACHE, cache_of
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig

    from llmnode.client.cache import SessionCache


@dataclass(slots=True)
class GenerateCall:
    """The caches that one call has opened, whether the caller gets them, and the clean-up if the call fails."""

    opened: list[SessionCache] = field(default_factory=list)
    returns_cache: bool = True
    failed: ExitStack = field(default_factory=ExitStack)


_running: ContextVar[GenerateCall | None] = ContextVar("_running", default=None)


def current_call() -> GenerateCall:
    """The innermost call that runs; a new one if transformers' own code opens a cache outside of any."""
    return _running.get() or GenerateCall()


def run_call(generate: Callable[[], Any]) -> Any:  # Any: what transformers' `generate` returns
    """Run a call. The sessions that it has opened end with it, unless it returns their cache."""
    call = GenerateCall()
    token = _running.set(call)
    output = None
    try:
        with call.failed:
            output = generate()
            call.failed.pop_all()
        if call.opened and not call.returns_cache and cache_of(output) is not None:
            output = type(output)(**{name: each for name, each in output.items() if name != CACHE})
        return output
    finally:
        _running.reset(token)
        returned = cache_of(output)
        for cache in call.opened:
            if cache is not returned and cache is not sessions_behind(returned):
                cache.close()


def check_options(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:  # Any: as transformers types it
    """Raises ConfigError for options that need blocks or keys and values in this process."""
    if not config.return_dict_in_generate:  # then nobody gets the outputs that a file may ask for
        model_kwargs.pop("output_attentions", None)
    if config.assistant_early_exit is not None:
        raise ConfigError("assistant_early_exit: the blocks are with the servers, and none of them drafts here")
    if config.cache_implementation == "quantized":
        raise ConfigError(f"cache_implementation='quantized': {QUANTIZED}")
