"""A cache that a caller has made as for a whole model, and that is empty: sessions take the place of its layers.

So `cache = DynamicCache(); model(ids, cache=cache)` works as with transformers alone: whatever the cache is asked, it
asks its layers, and the one that is there now asks the sessions.
"""

from __future__ import annotations

from transformers import Cache, EncoderDecoderCache, QuantizedCache

from llmnode.client.cache import SessionCache
from llmnode.client.session_layers import SessionLayer
from llmnode.errors import ConfigError

QUANTIZED = 'connect with dtype="float32+kv-int8" for servers whose keys and values have 8 bits'
PREFIXES = "PEFT's prefix tuning makes keys and values, and those are with the servers: use prompt tuning or p-tuning"


def sessions_behind(cache: object) -> SessionCache | None:
    """The sessions that `adopt` has put into it."""
    layers = cache.layers if isinstance(cache, Cache) else []
    sessions = layers[0].sessions if layers and isinstance(layers[0], SessionLayer) else None
    return sessions if isinstance(sessions, SessionCache) else None


def check_adoptable(cache: object) -> int | None:
    """The positions that it is made for, None without a limit. Raises ConfigError if sessions cannot replace it."""
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ConfigError(
            f"the cache is a {type(cache).__name__}: pass one that came with an output, model.open_cache(max_length), "
            "or an empty DynamicCache"
        )
    if isinstance(cache, QuantizedCache):
        raise ConfigError(f"a QuantizedCache: {QUANTIZED}")
    if any(getattr(layer, "is_initialized", False) for layer in cache.layers) and cache.get_seq_length():
        raise ConfigError(f"the cache holds keys and values of a model in this process: pass an empty one. {PREFIXES}")
    # Layers of a window say how long that is, which is no limit.
    limits = [layer.get_max_length() for layer in cache.layers if not getattr(layer, "is_sliding", False)]
    return limits[0] if limits and limits[0] > 0 else None


def adopt(cache: Cache, sessions: SessionCache) -> None:
    """Put `sessions` in the place of the layers of an empty cache."""
    cache.layers = sessions.layers
