"""A cache that a caller has made as for a whole model, and that is empty: sessions take the place of its layers.

So `cache = DynamicCache(); model(ids, cache=cache)` works as with transformers alone: whatever the cache is asked, it
asks its layers, and the one that is there now asks the sessions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from transformers import Cache, EncoderDecoderCache, QuantizedCache
from transformers.cache_utils import CacheLayerMixin

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin

    from llmnode.client.cache import SessionCache

    Layers = list[CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer]
    """The layers of a cache, as transformers types them."""

QUANTIZED = 'connect with dtype="float32+kv-int8" for servers whose keys and values have 8 bits'


class SessionLayer(CacheLayerMixin):
    """One layer of a cache whose keys and values are with the servers. It tells lengths, and changes nothing."""

    is_sliding = False
    is_croppable = True
    is_initialized = True

    def __init__(self, sessions: SessionCache) -> None:
        self.sessions = sessions

    @property
    def keys(self) -> NoReturn:  # type: ignore[override]  # an attribute of transformers' layers
        """Raises ConfigError."""
        _refuse()

    @property
    def values(self) -> NoReturn:  # type: ignore[override]  # likewise
        """Raises ConfigError."""
        _refuse()

    @property
    def batch_size(self) -> int:
        return self.sessions.rows

    def get_seq_length(self) -> int:
        return self.sessions.columns

    def get_max_length(self) -> int:
        return self.sessions.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sessions.get_mask_sizes(query_length, 0)

    def crop(self, _tokens_to_remove: int) -> None:
        """The first layer does this for all of them, and the operations below too."""

    def reset(self) -> None: ...

    def reorder_cache(self, _beam_idx: torch.LongTensor) -> None: ...

    def batch_select_indices(self, _indices: torch.Tensor) -> None: ...

    def batch_repeat_interleave(self, _repeats: int) -> None: ...

    def offload(self) -> None:
        """There is nothing here."""

    def prefetch(self) -> None:
        """There is nothing here either."""

    def lazy_initialization(self, *_states: Any) -> NoReturn:
        _refuse()

    def update(self, *_states: Any, **_options: Any) -> NoReturn:
        _refuse()


class FirstLayer(SessionLayer):
    """The layer that passes the operations of a whole cache on to the sessions."""

    def crop(self, tokens_to_remove: int) -> None:
        self.sessions.crop(tokens_to_remove)

    def reset(self) -> None:
        self.sessions.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.sessions.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.sessions.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.sessions.batch_repeat_interleave(repeats)


def session_layers(sessions: SessionCache, blocks: int) -> Layers:
    """The layers of a cache for `blocks` blocks whose keys and values are in `sessions`."""
    return [FirstLayer(sessions), *(SessionLayer(sessions) for _ in range(blocks - 1))]


def _refuse() -> NoReturn:
    raise ConfigError("keys and values are with the servers: copy the cache with copy.deepcopy")


def sessions_behind(cache: object) -> SessionCache | None:
    """The sessions that `adopt` has put into it."""
    layers = cache.layers if isinstance(cache, Cache) else []
    return layers[0].sessions if layers and isinstance(layers[0], SessionLayer) else None


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
        raise ConfigError("the cache holds keys and values of a model in this process: pass an empty one")
    # Layers of a window say how long that is, which is no limit.
    limits = [layer.get_max_length() for layer in cache.layers if not getattr(layer, "is_sliding", False)]
    return limits[0] if limits and limits[0] > 0 else None


def adopt(cache: Cache, sessions: SessionCache) -> None:
    """Put `sessions` in the place of the layers of an empty cache."""
    cache.layers = sessions.layers
