"""A transformers model whose blocks are in the swarm: `generate` and all that belongs to it is transformers' own."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from llmnode.client.adopted import adopt, check_adoptable, sessions_behind
from llmnode.client.batch import Past, Positions, check_ends_real, check_labels, kept_columns, read_batch
from llmnode.client.cache import CacheTerms, SessionCache
from llmnode.client.forward import (
    OF_LOSS,
    are_last_normed,
    check_others,
    chosen_states,
    given_states,
    hidden_states,
    of_servers,
    run,
    scores,
)
from llmnode.client.generate_call import check_options, current_call, run_call
from llmnode.client.hidden_session import HiddenSession
from llmnode.client.released import releasing
from llmnode.client.remote_blocks import RemoteBlocks
from llmnode.client.versions import CACHE, named_for_generate, takes_cache_of_generate
from llmnode.core.priority import PRIORITIES
from llmnode.core.span import Span
from llmnode.core.texts.beams import first_alike
from llmnode.errors import ConfigError
from llmnode.models.families import family_of
from llmnode.models.generation_config import generation_config
from llmnode.session.passes import SwarmPasses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import GenerationConfig

    from llmnode.client.connect import Client
    from llmnode.client.portal import Portal
    from llmnode.core.model import ModelInfo
    from llmnode.core.route import Route
    from llmnode.core.traffic import Traffic
    from llmnode.models.load import Ends
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.models.text.tokenizer import Tokenizer

FIRST_POSITIONS = 64
"""Room of a cache that will grow, at first: a prompt and an answer of a few lines."""


class DistributedModelForCausalLM(PreTrainedModel, GenerationMixin):
    """Made by `llmnode.connect`. Holds the ends of the model; a forward runs the blocks at the peers.

    It can do all that a transformers model can, except gradients (but see `remote_blocks`), attentions, the hidden
    states between blocks, and attention that is not causal.
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
        """The cache of `llmnode.resume`: pass it as `cache`."""
        self._ends = ends
        self._client = client
        self._portal = portal
        self._stack = stack
        # Else `pipeline` says that it does not support this class, and names two hundred that it does.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("llmnode", DistributedModelForCausalLM.__name__)
        are_learned = family_of(folder.config).positions is not None
        self._positions = Positions(folder.config, learned=self.info.context_tokens if are_learned else None)
        weight = self.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor), "an embedding"
        self._embedding_size = weight.shape[1]
        self.generation_config = generation_config(folder)
        self._passes = SwarmPasses(client.router.finder, client.codec)

    @property
    def remote_blocks(self) -> RemoteBlocks:
        """The blocks as a module of torch, through which gradients flow: `model.remote_blocks[3:7](hidden)`."""
        return RemoteBlocks(self._portal, self._passes, Span(0, self.info.blocks))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm: end every session and connection. Safe to call twice."""
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its computation and hidden states, independent of the form of its weights."""
        return self._ends.dtype

    @property
    def route(self) -> Route:
        """The hops of the session that was opened last; before that, those that one would take."""
        return self._client.route

    @property
    def traffic(self) -> Traffic:
        """Bytes of hidden states that have crossed our links, for all sessions of this model."""
        return self._client.traffic

    def open_cache(
        self, max_length: int, rows: int = 1, alike: int = 1, priority: str | None = None, *, waits: bool = True
    ) -> SessionCache:
        """A cache to pass as `cache`, kept between calls of `generate`; close it when done.

        It has room for `max_length` positions, from the start. `rows` are as many as there are prompts times beams or
        answers of each, and `alike` are those of one prompt. `priority` tells servers what they are for: "interactive"
        (default), "batch" or "training". Raises ConfigError if `max_length` exceeds the model's context, PeerRefused if
        a server has no room, also after some time; without `waits` sooner.
        """
        if max_length < 1:
            raise ConfigError(f"a cache of {max_length} positions: ask for 1 to {self.info.context_text}")
        return self._open_cache(max_length, rows, alike, priority, waits=waits)

    @contextmanager
    def inference_session(self, max_length: int, rows: int = 1, priority: str | None = None) -> Iterator[HiddenSession]:
        """Petals' primitive: `session.step(hidden)` runs hidden states through all blocks.

        `max_length`, `rows` and `priority` are those of `open_cache`, and so are the errors.
        """
        with self.open_cache(max_length, rows, priority=priority) as cache:
            yield HiddenSession(cache)

    __call__ = releasing(PreTrainedModel.__call__)

    @releasing
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:  # Any: transformers' own signature
        """transformers' `generate`, with its `args` and `kwargs`. Returns what it returns.

        The sessions that it opens end with it, unless it returns their cache. `client/README.md` lists the uses that
        work, and those that are refused with ConfigError.
        """
        if kwargs.get("cache_implementation") == "paged":
            raise ConfigError("continuous batching is the servers' own: call generate from several threads instead")
        given = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(given, torch.Tensor) and given.ndim == 2:
            mask = kwargs.get("attention_mask")
            new = mask[:, -given.shape[1] :].bool() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
            self._check_tokens(given, new if new is not None and new.shape == given.shape else None)
        return run_call(lambda: GenerationMixin.generate(self, *args, **named_for_generate(kwargs)))

    # The former name is taken while transformers' own models take it.
    @takes_cache_of_generate
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]  # theirs
    @can_return_tuple  # type: ignore[untyped-decorator]  # theirs
    def forward(  # noqa: PLR0913  # the parameters are those of transformers' causal LMs
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | None = None,
        **others: Any,  # Any: most of it is refused, whatever it is
    ) -> CausalLMOutputWithPast:
        """Run the forward of a causal LM of transformers: scores (rows, kept columns, vocabulary), and the loss.

        The arguments are transformers'. `input_ids`, `attention_mask`, `position_ids` and `labels` are (rows, columns);
        `inputs_embeds` is (rows, columns, hidden_size), and stands for `input_ids`. `logits_to_keep` is how many of the
        last columns get scores (0 for all of them), or the columns' indices. With `output_hidden_states` the
        `hidden_states` of the output has the first and the last one. A loss takes some of the `others`.

        Without `cache` one is opened, which grows as it is used; it comes back unless `use_cache` is False, and its
        sessions end when it is closed or forgotten. Where the mask has padding, scores are zero. Raises ConfigError,
        before anything is computed, for a use that a session cannot do.
        """
        check_others({**others, "labels": labels, "output_hidden_states": output_hidden_states}, self.config)
        given = given_states(input_ids, inputs_embeds, self._embedding_size)
        rows, columns = given.shape[:2]
        sessions = self._sessions_of(cache, rows)
        past = Past.empty(rows) if sessions is None else sessions.settled()
        batch = read_batch(past, columns, attention_mask, position_ids, self._positions)
        if input_ids is not None:
            self._check_tokens(given, batch.real)
        kept = kept_columns(rows, columns, logits_to_keep)
        if labels is not None:
            check_labels(labels, batch.real, others.get("shift_labels"))
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        chosen = chosen_states(asked, self._ends.embedding, self.info.blocks)

        def run_in(sessions: SessionCache, cache: Cache | None) -> CausalLMOutputWithPast:
            ends, config = self._client.ends, self.config.get_text_config()
            are_normed = are_last_normed(config, self._ends.embedding)
            with torch.no_grad():
                ran = run(ends, sessions, batch, given)
                logits = scores(ends, ran, kept, config.vocab_size)
                states: Any = hidden_states(ends, ran, self.info, chosen, are_normed=are_normed)
            loss = None
            if labels is not None:
                options = {name: others[name] for name in OF_LOSS if name in others}
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **options)
            more = of_servers(config, rows, columns, sessions.columns)
            output: Any = MoeCausalLMOutputWithPast if "router_logits" in more else CausalLMOutputWithPast
            made: CausalLMOutputWithPast = output(
                loss=loss, logits=logits, hidden_states=states, **{CACHE: cache}, **more
            )
            return made

        if sessions is not None:
            sessions.make_room(batch.longest)
            return run_in(sessions, cache)
        is_kept = cache is not None or (getattr(self.config, "use_cache", True) if use_cache is None else use_cache)
        with ExitStack() as stack:
            if cache is not None:
                opened = stack.enter_context(self._opened_for(cache, rows, max(batch.longest, FIRST_POSITIONS)))
                opened.make_room(batch.longest)
                output = run_in(opened, cache)
                adopt(cache, opened)
            else:
                length = max(2 * batch.longest, FIRST_POSITIONS) if use_cache else batch.longest
                self._check_context(batch.longest)
                terms = CacheTerms(max(1, min(length, self.info.context_tokens)), grows=bool(is_kept))
                alike = first_alike(given.flatten(1).tolist())
                opened = stack.enter_context(SessionCache(self._portal, self._client, rows, terms, alike))
                output = run_in(opened, opened if is_kept else None)
            if is_kept:
                stack.pop_all()
                current_call().failed.callback(_close, weakref.ref(opened))
            return output

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises ConfigError, which names the token, if one of `token_ids` is not one of the model's."""
        self._client.ends.check(token_ids)

    def _check_tokens(self, input_ids: torch.Tensor, real: torch.Tensor | None) -> None:
        """Raises ConfigError as `check_tokens` does. Padding may be any token."""
        self.check_tokens((input_ids if real is None else input_ids[real]).flatten().tolist())

    def train(self, mode: bool = True) -> Self:
        """Raises ConfigError unless `mode` is False: there is no dropout, and no backward pass yet."""
        if mode:
            raise ConfigError("a distributed model cannot be trained yet: it is always as after eval()")
        return self

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Tied weights have been read as one."""

    def save_pretrained(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises ConfigError: the weights of the blocks are with the servers."""
        raise ConfigError("the weights of the blocks are not here: copy the model's folder instead")

    def push_to_hub(self, *_args: Any, **_kwargs: Any) -> NoReturn:  # type: ignore[override]  # theirs is wrapped
        """Raises ConfigError as `save_pretrained` does."""
        self.save_pretrained()

    def resize_token_embeddings(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises ConfigError: servers and other clients have the model as it is."""
        raise ConfigError("a served model cannot be changed: change its folder, and serve that")

    set_input_embeddings = set_output_embeddings = resize_token_embeddings

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The function that `to`, `half`, `cuda` and the like call. Raises ConfigError if it would change anything."""
        here = torch.empty(1, dtype=self.dtype)
        there = fn(here)
        if (there.dtype, there.device) != (here.dtype, here.device):
            raise ConfigError(f"the client's part of the model stays on the CPU in {self.dtype}: leave out the change")
        return self

    def get_input_embeddings(self) -> torch.nn.Module:
        module: torch.nn.Module = self._ends.embedding.get_input_embeddings()  # type: ignore[operator]  # a PreTrainedModel
        return module

    def get_output_embeddings(self) -> torch.nn.Module:
        """The model's own scoring layer."""
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
        """Open the sessions that `generate` needs, unless it was given some. Refuse a text that will not fit."""
        check_ends_real(model_kwargs.get("attention_mask"))
        check_options(generation_config, model_kwargs)
        most = self.info.context_tokens
        if most < generation_config.max_length == self.generation_config.max_length:  # it is the model's own file's
            warnings.warn(f"texts end at the model's context of {most} tokens, and not at its max_length", stacklevel=2)
            generation_config.max_length, max_cache_length = most, most - 1
        alike = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        rows = batch_size * alike
        cacheless = generation_config.use_cache is False
        if cacheless and generation_mode == GenerationMode.ASSISTED_GENERATION:
            return  # which transformers refuses
        given = model_kwargs.get(CACHE)
        if given is not None and not isinstance(given, Cache):
            check_adoptable(given)
        if given is not None and cacheless:
            raise ConfigError("use_cache=False with a cache: leave out one of them")
        if generation_config.cache_implementation is not None or given is not None:
            own: Any = self  # Any: as above
            GenerationMixin._prepare_cache_for_generation(
                own, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        # Otherwise the whole text would be run for each token. It is the same text.
        generation_config.use_cache = True
        sessions = self._sessions_of(given, rows)
        if sessions is not None:
            sessions.make_room(max_cache_length)
            return
        call = current_call()
        self._check_context(max_cache_length + 1)
        if (made := model_kwargs.get(CACHE)) is not None:  # the caller's, or of the class that was asked for
            opened = self._opened_for(made, rows, max_cache_length + 1, alike)
            call.failed.callback(setattr, made, "layers", made.layers)
            adopt(made, opened)
        else:
            opened = model_kwargs[CACHE] = self._open_cache(max_cache_length + 1, rows, alike, grows=True)
        call.failed.callback(opened.close)
        opened.make_room(max_cache_length)
        if given is None:
            call.opened.append(opened)
        call.returns_cache = not cacheless

    def _sessions_of(self, cache: Cache | None, rows: int) -> SessionCache | None:
        """The sessions of a cache; None for an empty cache of transformers' own. Raises ConfigError for any other."""
        if cache is None:
            return None
        found = cache if isinstance(cache, SessionCache) else sessions_behind(cache)
        if found is None:
            check_adoptable(cache)
        elif found.rows != rows:
            raise ConfigError(f"{rows} rows for a cache of {found.rows}: open it with rows={rows}")
        return found

    def _opened_for(self, cache: Cache, rows: int, max_length: int, alike: int = 1) -> SessionCache:
        """Sessions for an empty cache, which are as long as it is made for."""
        most = check_adoptable(cache)
        return self._open_cache(min(most or max_length, self.info.context_tokens), rows, alike, grows=most is None)

    def _open_cache(
        self, max_length: int, rows: int, alike: int = 1, priority: str | None = None, **terms: bool
    ) -> SessionCache:
        if priority is not None and priority not in PRIORITIES:
            raise ConfigError(f"there is no priority {priority!r}: choose one of {', '.join(PRIORITIES)}")
        self._check_context(max_length)
        firsts = [row - row % alike for row in range(rows)]
        of_priority = None if priority is None else PRIORITIES[priority]
        return SessionCache(self._portal, self._client, rows, CacheTerms(max_length, of_priority, **terms), firsts)

    def _check_context(self, positions: int) -> None:
        if not 0 <= positions <= self.info.context_tokens:
            most = self.info.context_text
            raise ConfigError(f"{positions} positions do not fit the model's context: ask for 1 to {most}")


def _close(cache: weakref.ref[SessionCache]) -> None:
    """End its sessions if it is still there."""
    if (found := cache()) is not None:
        found.close()
