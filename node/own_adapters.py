"""The adapters of `serve --adapters`: they are read and checked before the node takes its first session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.adapters import MOST_ADAPTERS
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.adapters import AnnouncedAdapter
    from llmnode.core.model import ModelInfo
    from llmnode.wire.adapter import Adapter


def check_number(named: Sequence[str]) -> None:
    """Raises ConfigError for more adapters than an announcement has."""
    if len(named) > MOST_ADAPTERS:
        raise ConfigError(f"--adapters: {len(named)} are named, of at most {MOST_ADAPTERS}: serve fewer")


async def own_adapters(
    named: Sequence[str], model: ModelInfo, report: Callable[[str], None]
) -> Mapping[AnnouncedAdapter, Adapter]:
    """Read them. Raises ConfigError or AdapterError."""
    if not named:  # a node without any needs no NumPy
        return {}
    from llmnode.models.peft_folder import MOST_BYTES, read_named

    found: dict[AnnouncedAdapter, Adapter] = {}
    for each in named:
        report(f"reading the adapter {each}")
        own = await trio.to_thread.run_sync(read_named, each, model, report)
        if any(own.name == other.name or own.adapter.digest == other.digest for other in found):
            raise ConfigError(f"--adapters {each}: there is one of that name or content already: leave one out")
        found[own.announced] = own.adapter
    sizes = [len(part) for adapter in found.values() for part in adapter.parts.values()]
    if sum(sizes) > MOST_BYTES:
        raise ConfigError(f"--adapters: they have {sum(sizes) >> 20} MiB, of at most {MOST_BYTES >> 20}: serve fewer")
    return found
