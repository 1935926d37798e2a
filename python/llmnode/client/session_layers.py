"""The layers of a cache whose keys and values are with the servers: each asks the sessions behind all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from transformers.cache_utils import CacheLayerMixin

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import Cache
    from transformers.cache_utils import DummyLayer, LinearAttentionCacheLayerMixin

    Layers = list[CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer]
    """The layers of a cache, as transformers types them."""


class SessionLayer(CacheLayerMixin):
    """One layer of a cache whose keys and values are with the servers. It tells lengths, and changes nothing."""

    is_sliding = False
    is_croppable = True
    is_initialized = True

    def __init__(self, sessions: Cache) -> None:
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
        return self.sessions.batch_size

    def get_seq_length(self) -> int:
        return self.sessions.get_seq_length()

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


def session_layers(sessions: Cache, blocks: int) -> Layers:
    """The layers of a cache for `blocks` blocks whose keys and values are in `sessions`."""
    return [FirstLayer(sessions), *(SessionLayer(sessions) for _ in range(blocks - 1))]


def _refuse() -> NoReturn:
    raise ConfigError("keys and values are with the servers: copy the cache with copy.deepcopy")
