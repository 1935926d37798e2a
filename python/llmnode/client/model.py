"""A transformers model whose blocks are in the swarm: `generate` and all that belongs to it is transformers' own."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg

from llmnode.client.cache import SessionCache
from llmnode.client.connect import aconnect, aresume, load_parts
from llmnode.client.portal import open_portal
from llmnode.core.beams import first_alike
from llmnode.core.policy import ClientPolicy, RelayedPolicy
from llmnode.core.scheduling import PRIORITIES
from llmnode.errors import ConfigError
from llmnode.models.narrow_ends import MOST_ROWS
from llmnode.models.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from llmnode.client.connect import Client
    from llmnode.client.portal import Portal
    from llmnode.core.model import ModelInfo
    from llmnode.core.route import Route
    from llmnode.core.traffic import Traffic
    from llmnode.models.folder import ModelFolder
    from llmnode.models.parts import Ends
    from llmnode.models.tokenizer import Tokenizer

_opened_for_generate: ContextVar[ExitStack | None] = ContextVar("_opened_for_generate", default=None)
"""Closes the sessions that the running `generate` opened."""


def connect(
    name: str | None = None,
    *,
    peers: Sequence[str] = (),
    swarm_key: str | Path | None = None,
    codec: str = "raw",
    dtype: str = "float32",
    spot_check: float = 0.0,
    relayed_prefill: str = "wait",
    report: Callable[[str], None] = lambda _line: None,
) -> DistributedModelForCausalLM:
    """The model `name` (by default the embedded one), its blocks in the swarm of `peers`, as a transformers model.

    If the swarm is private, `swarm_key` is an invite, which names peers too, or the file of its key.

    `codec` is how hidden states cross the wire: "raw" is exact; "fp16", "bf16" and "int8" are lossy and smaller. Only
    servers that compute in `dtype` are used: "float32" is exact, "float32+int8" and the like have quantized weights
    (`core.model.PRECISIONS`). `spot_check` is the share of what they compute that others compute again
    (`client/spot.py`); a session that so finds a cheat ends with SessionLost. `relayed_prefill` is
    for long prompts to servers that are reached through a relay: "wait" some seconds for a direct way and then use the
    relay, "allow" that at once, or "refuse" it with ConfigError. `report` is told in a line what takes long, as a
    download does. What is returned is a context manager; or call `close()` when done. Raises ConfigError, PeerError or
    NoRoute.
    """
    policy = ClientPolicy(spot_check=spot_check, relayed=RelayedPolicy(prefill=relayed_prefill))
    folder = open_model(name, report)
    parts = load_parts(folder)
    with ExitStack() as stack:
        portal = stack.enter_context(open_portal())
        client = stack.enter_context(
            portal.enter(aconnect(peers, swarm_key=swarm_key, parts=parts, codec=codec, dtype=dtype, policy=policy))
        )
        return DistributedModelForCausalLM(folder, parts.ends, client, portal, stack.pop_all())


def resume(
    path: str | Path,
    name: str | None = None,
    *,
    peers: Sequence[str] = (),
    swarm_key: str | Path | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> DistributedModelForCausalLM:
    """Go on with what `SessionCache.export` has saved in the file at `path`: it is the model's `resumed`.

    `name` and `report` are as for `connect`; codec and dtype are the session's. The swarm is that of the peers named in
    the file, and `peers`; `swarm_key` is as for `connect`. Raises as `connect`, ConfigError if the file is no session
    of this model, and SessionLost.
    """
    folder = open_model(name, report)
    parts = load_parts(folder)
    with ExitStack() as stack:
        portal = stack.enter_context(open_portal())
        entered = stack.enter_context(portal.enter(aresume(path, peers=peers, swarm_key=swarm_key, parts=parts)))
        model = DistributedModelForCausalLM(folder, parts.ends, entered.client, portal, stack.pop_all())
    model.resumed = SessionCache.resumed(portal, entered)
    return model


class AutoDistributedModelForCausalLM:
    """Petals' name for `connect`."""

    @staticmethod
    def from_pretrained(
        name: str | None = None, *, initial_peers: Sequence[str], codec: str = "raw", dtype: str = "float32"
    ) -> DistributedModelForCausalLM:
        """As `llmnode.connect(name, peers=initial_peers, codec=codec, dtype=dtype)`."""
        return connect(name, peers=initial_peers, codec=codec, dtype=dtype)


class DistributedModelForCausalLM(PreTrainedModel, GenerationMixin):
    """Made by `llmnode.connect`. Holds the ends of the model; a forward runs the blocks at the peers.

    There are no gradients. Batches are padded on the left. `inputs_embeds` are not supported yet.
    """

    main_input_name = "input_ids"
    _supports_sdpa = True  # of the ends, which have no attention

    def __init__(self, folder: ModelFolder, ends: Ends, client: Client, portal: Portal, stack: ExitStack) -> None:
        super().__init__(copy.deepcopy(folder.config))
        self.tokenizer: Tokenizer = client.tokenizer
        self.info: ModelInfo = client.model
        self.embedding = ends.embedding
        self.scoring = ends.scoring
        self.resumed: SessionCache | None = None
        """What `llmnode.resume` goes on with: pass it as `cache`."""
        self._ends = ends
        self._client = client
        self._portal = portal
        self._stack = stack
        if (folder.path / "generation_config.json").exists():
            self.generation_config = GenerationConfig.from_pretrained(folder.path, local_files_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm: end every session and connection. Safe to call twice."""
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, and hidden states are of, whatever its weights are kept as."""
        return self._ends.dtype

    @property
    def route(self) -> Route:
        """The hops of the session that was opened last; before that, those that one would take."""
        return self._client.route

    @property
    def traffic(self) -> Traffic:
        """Bytes of hidden states that have crossed our links so far, for all of this model's sessions."""
        return self._client.traffic

    def open_cache(
        self, max_length: int, rows: int = 1, alike: int = 1, priority: str | None = None, *, waits: bool = True
    ) -> SessionCache:
        """A cache to pass as `cache`, kept between calls of `generate`; close it when done.

        `rows` are as many as there are prompts times beams or answers of each, and `alike` are those of one prompt.
        `priority` tells servers what they are for: "interactive" (default), "batch" or "training".
        Raises ConfigError if `max_length` exceeds the model's context, PeerRefused if a server has no room, also after
        some time; without `waits` sooner.
        """
        if priority is not None and priority not in PRIORITIES:
            raise ConfigError(f"there is no priority {priority!r}: choose one of {', '.join(PRIORITIES)}")
        model = self._client.model
        if not 1 <= max_length <= model.context_tokens:
            most = model.context_text
            raise ConfigError(f"{max_length} positions do not fit the model's context: ask for 1 to {most}")
        of_priority = None if priority is None else PRIORITIES[priority]
        return SessionCache(self._portal, self._client, rows, max_length, alike, of_priority, waits=waits)

    @contextmanager
    def inference_session(self, max_length: int, rows: int = 1, priority: str | None = None) -> Iterator[HiddenSession]:
        """Petals' primitive: `session.step(hidden)` runs hidden states through all blocks. See `open_cache`."""
        with self.open_cache(max_length, rows, priority=priority) as cache:
            yield HiddenSession(cache)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:  # Any: transformers' own signature
        """transformers' `generate`. Sessions that it opens are closed when it ends, however it ends."""
        with ExitStack() as opened:
            token = _opened_for_generate.set(opened)
            try:
                return GenerationMixin.generate(self, *args, **kwargs)
            finally:
                _opened_for_generate.reset(token)

    # As long as transformers' own models know the former name.
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]  # theirs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: SessionCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **unsupported: Any,  # Any: refused, whatever it is
    ) -> CausalLMOutputWithPast:
        """Scores of the next token, (rows, kept columns, vocabulary); 0 `logits_to_keep` keeps all columns.

        Without `cache` a session is opened for this call alone; `open_cache` makes one that lasts.
        `position_ids` must be those that follow from `attention_mask`, as transformers' own are.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError("give input_ids; hidden states go through model.inference_session(...).step(hidden)")
        if wrong := [name for name, value in unsupported.items() if value is not None and value is not False]:
            raise ConfigError(f"not supported by a distributed model: {', '.join(wrong)}")
        if cache is not None:
            logits = self._run(cache, input_ids, attention_mask, position_ids, logits_to_keep)
            return CausalLMOutputWithPast(logits=logits, cache=cache)
        with self.open_cache(input_ids.shape[1], rows=input_ids.shape[0]) as opened:
            logits = self._run(opened, input_ids, attention_mask, position_ids, logits_to_keep)
            return CausalLMOutputWithPast(logits=logits)

    def get_input_embeddings(self) -> torch.nn.Module:
        module: torch.nn.Module = self._ends.embedding.get_input_embeddings()  # type: ignore[operator]  # a PreTrainedModel
        return module

    def get_output_embeddings(self) -> torch.nn.Module:
        module: torch.nn.Module = self._ends.scoring.get_output_embeddings()  # type: ignore[operator]  # likewise
        return module

    def _prepare_cache_for_generation(  # type: ignore[override]  # transformers' own returns nothing either
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:  # Any: transformers' hook, as it types it
        """Open the sessions that `generate` needs, unless it was given some. Refuses what will not fit."""
        if generation_config.use_cache is False:
            raise ConfigError("use_cache=False would run the whole prompt at every token: leave it out")
        if model_kwargs.get("cache") is None:
            alike = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            opened = _opened_for_generate.get()
            assert opened is not None, "called by `generate` alone"
            cache = self.open_cache(max_cache_length + 1, batch_size * alike, alike)
            model_kwargs["cache"] = opened.enter_context(cache)
        elif not isinstance(model_kwargs["cache"], SessionCache):
            raise ConfigError("the cache of a distributed model comes from model.open_cache(max_length)")

    @torch.no_grad()
    def _run(
        self,
        cache: SessionCache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        keep: int,
    ) -> torch.Tensor:
        rows, columns = input_ids.shape
        if rows != cache.rows:
            raise ConfigError(f"{rows} rows for a cache of {cache.rows}: open it with rows={rows}")
        tokens = _unpadded(cache, input_ids, attention_mask)
        if position_ids is not None:
            _check_positions(cache, tokens, position_ids)
        given = [row.tolist() for row in tokens]
        firsts = first_alike(given) if cache.is_empty else list(range(rows))
        hidden = [
            self._client.ends.embed(row, cache.positions(index)) if row and first == index else None
            for index, (row, first) in enumerate(zip(given, firsts, strict=True))
        ]
        outputs = cache.run_first(hidden, given) if cache.is_empty else cache.run_rows(hidden)
        cache.reorder(firsts)  # a prompt with several beams or answers has been run once
        cache.columns += columns
        kept = min(keep, columns) if keep else columns
        logits = torch.zeros(rows, kept, self.config.vocab_size)
        run = [(index, output[-kept:]) for index, output in enumerate(outputs) if output is not None]
        together = max(1, MOST_ROWS // kept)
        for start in range(0, len(run), together):
            some = run[start : start + together]
            scores = self._client.ends.logits(torch.cat([last for _, last in some]))
            for (index, last), own in zip(some, scores.split([len(last) for _, last in some]), strict=True):
                logits[index, kept - len(last) :] = own
        for index, first in enumerate(firsts):
            if first != index:
                logits[index] = logits[first]
        return logits


class HiddenSession:
    """Hidden states through all blocks, position by position."""

    def __init__(self, cache: SessionCache) -> None:
        self._cache = cache

    @property
    def position(self) -> int:
        """Positions behind us. Set a lower one to roll back to it."""
        return self._cache.columns

    @position.setter
    def position(self, position: int) -> None:
        self._cache.crop(position)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (rows, tokens, hidden_size) fp32, as it leaves the embedding. Returns it after the last block."""
        if hidden.dim() != 3 or hidden.shape[0] != self._cache.rows or not hidden.shape[1]:
            raise ConfigError(
                f"hidden states of shape {tuple(hidden.shape)}: expected ({self._cache.rows}, tokens, size)"
            )
        outputs = self._cache.run_rows([row.detach().float() for row in hidden])
        self._cache.columns += hidden.shape[1]
        return torch.stack([output for output in outputs if output is not None])


def _unpadded(cache: SessionCache, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Each row's new tokens without its padding, which is noted in the cache. Raises ConfigError for other masks."""
    new = input_ids.shape[1]
    if attention_mask is None:
        return list(input_ids)
    if attention_mask.dim() != 2 or attention_mask.shape != (cache.rows, cache.columns + new):
        raise ConfigError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: expected ({cache.rows}, {cache.columns + new})"
        )
    if attention_mask.all():
        cache.paddings = [0] * cache.rows
        return list(input_ids)
    real = attention_mask.bool()
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ConfigError('pad on the left: set padding_side="left" in the tokenizer')
    cache.paddings = [int(row.shape[0] - row.sum()) for row in real]
    return [ids[row] for ids, row in zip(input_ids, real[:, -new:], strict=True)]


def _check_positions(cache: SessionCache, tokens: Sequence[torch.Tensor], position_ids: torch.Tensor) -> None:
    """Refuse what would be ignored: a session counts its positions itself. Those of padding do not matter."""
    for index, row in enumerate(tokens):
        given = position_ids[index % len(position_ids)]
        first = cache.positions(index)
        if given[len(given) - len(row) :].tolist() != list(range(first, first + len(row))):
            raise ConfigError("position_ids of one's own are not supported: leave them out")
