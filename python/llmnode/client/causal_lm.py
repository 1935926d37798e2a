"""A transformers model whose blocks are in the swarm: `generate` and all that belongs to it is transformers' own."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from llmnode.client.adopted import adopt, check_adoptable, sessions_behind
from llmnode.client.batch import Past, check_ends_real, check_labels, kept_columns, read_batch
from llmnode.client.cache import SessionCache
from llmnode.client.cache_terms import CacheTerms
from llmnode.client.changes import state_of
from llmnode.client.decoder import check_cacheless
from llmnode.client.distributed import Distributed
from llmnode.client.ends import SharedEnds
from llmnode.client.family_attributes import take_attributes
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
from llmnode.client.heads import make_head
from llmnode.client.hidden_session import HiddenSession
from llmnode.client.prompt_tuning import MODULES, copied_prompts
from llmnode.client.released import releasing
from llmnode.client.row_adapters import told_by_row
from llmnode.client.versions import CACHE, named_for_generate, takes_cache_of_generate
from llmnode.core.priority import PRIORITIES
from llmnode.core.texts.beams import first_alike
from llmnode.errors import ConfigError
from llmnode.models.decoder_parts import entry_of, exit_of, replace_decoder, shallow_copy
from llmnode.models.generation_config import generation_config
from llmnode.models.load import cut_ends

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import GenerationConfig

    from llmnode.client.distributed import Connection

FIRST_POSITIONS = 64
"""Positions of a cache that will grow, at first: a prompt and an answer of a few lines."""


class DistributedModelForCausalLM(Distributed, GenerationMixin):
    """Made by `llmnode.connect`. Holds the ends of the model; a forward runs the blocks at the peers.

    It can do all that a transformers model can, except attentions, the hidden states between blocks, and attention
    that is not causal.
    """

    main_input_name = "input_ids"

    def __init__(self, connection: Connection) -> None:
        folder = connection.folder
        super().__init__(copy.deepcopy(folder.config))
        self._connection = connection
        self.resumed: SessionCache | None = None
        """The cache of `llmnode.resume`: pass it as `cache`."""
        self._client, self._portal, self._ends = connection.client, connection.portal, connection.ends
        # Else `pipeline` says that it does not support this class, and names two hundred that it does.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("llmnode", DistributedModelForCausalLM.__name__)
        self.generation_config = generation_config(folder)
        self._whole = [connection.distribute(self._ends.whole, self.config)]  # in a list it is no child of ours
        take_attributes(self, self._whole[0])
        for name, module in self._whole[0]._modules.items():
            self.add_module(name, module)
        self._shared_ends = self._client.ends
        self._state_of_ends = self._frozen_state = self._ends_now()

    def with_head(self, head: str, **options: Any) -> Any:  # Any: a class of transformers, by the family
        """A model of the same connection with another `head`: "sequence-classification" or "token-classification".

        It is transformers' model of the family for that task, with a head whose weights are new and are trained.
        `options` are attributes of its config: `num_labels`, `problem_type`, `id2label`, `pad_token_id` and the like.
        One label is a number, as transformers has it. Raises ConfigError for a head that transformers does not have for
        this family, and for an unknown option.
        """
        return make_head(self._connection, head, options)

    def open_cache(
        self,
        max_length: int,
        rows: int = 1,
        alike: int = 1,
        priority: str | None = None,
        *,
        waits: bool = True,
        prompts: torch.Tensor | None = None,
    ) -> SessionCache:
        """A cache to pass as `cache`, kept between calls of `generate`; close it when done.

        It holds `max_length` positions, from the start. `rows` are as many as there are prompts times beams or
        answers of each, and `alike` are those of one prompt. `priority` tells servers what they are for: "interactive"
        (default), "batch" or "training". `prompts` are deep prompts for the first positions of each row, (blocks, 1,
        positions, hidden_size), see `RemoteBlocks.forward`. Raises ConfigError if `max_length` exceeds the model's
        context or the prompts do not fit, PeerRefused if a server has no KV free, also after some time; without `waits`
        sooner.
        """
        if max_length < 1:
            raise ConfigError(f"a cache of {max_length} positions: ask for 1 to {self.info.context_text}")
        terms: dict[str, Any] = {"waits": waits}
        if prompts is not None:
            if self._prompts:
                raise ConfigError("this model has trained prompts: leave out others, or call tune_prompts(None)")
            terms["prompts"] = copied_prompts(self.remote_blocks.fitting_prompts(prompts, 1, max_length))
        return self._open_cache(max_length, rows, alike, priority, **terms)

    @contextmanager
    def inference_session(self, max_length: int, rows: int = 1, priority: str | None = None) -> Iterator[HiddenSession]:
        """Petals' primitive: `session.step(hidden)` runs hidden states through all blocks.

        `max_length`, `rows` and `priority` are those of `open_cache`, and so are the errors. It has no trained prompts.
        """
        with self._open_cache(max_length, rows, priority=priority, has_prompts=False) as cache:
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
        sessions end when it is closed or forgotten. Where the mask has padding, scores are zero. If gradients are
        wanted, there is no session, and no cache comes back. Raises ConfigError, before anything is computed, for a use
        that servers cannot do.
        """
        check_others({**others, "labels": labels, "output_hidden_states": output_hidden_states}, self.config)
        given = given_states(input_ids, inputs_embeds, self.decoder.embedding_size)
        rows, columns = given.shape[:2]
        sessions = self._sessions_of(cache, rows)
        past = Past.empty(rows, self._prompts) if sessions is None else sessions.settled()
        batch = read_batch(past, columns, attention_mask, position_ids, self._connection.positions)
        if input_ids is not None:
            self._check_tokens(given, batch.real)
        kept = kept_columns(rows, columns, logits_to_keep)
        if labels is not None:
            check_labels(labels, batch.real, others.get("shift_labels"))
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if self._wants_gradients(inputs_embeds):
            check_cacheless(cache, use_cache)
            return self._learn(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                labels=labels,
                logits_to_keep=logits_to_keep,
                output_hidden_states=asked,
                **{name: others[name] for name in OF_LOSS if name in others},
            )
        chosen = chosen_states(asked, self._ends.embedding, self.info.blocks)

        def run_in(sessions: SessionCache, cache: Cache | None) -> CausalLMOutputWithPast:
            ends, config = self._current_ends(), self.config.get_text_config()
            are_normed = are_last_normed(config, self._ends.embedding)
            with torch.no_grad():
                ran = run(ends, sessions, batch, given.detach(), told_by_row(self._modules, self.remote_blocks))
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
            sessions.grow_to(batch.longest)
            return run_in(sessions, cache)
        is_kept = cache is not None or (getattr(self.config, "use_cache", True) if use_cache is None else use_cache)
        with ExitStack() as stack:
            if cache is not None:
                opened = stack.enter_context(self._opened_for(cache, rows, max(batch.longest, FIRST_POSITIONS)))
                opened.grow_to(batch.longest)
                output = run_in(opened, cache)
                adopt(cache, opened)
            else:
                length = max(2 * batch.longest, FIRST_POSITIONS) if use_cache else batch.longest
                self._check_context(batch.longest + self._prompts)
                most = max(1, min(length + self._prompts, self.info.context_tokens))
                terms = self._cache_terms(most, rows, grows=bool(is_kept))
                alike = first_alike(given.flatten(1).tolist())
                opened = stack.enter_context(SessionCache(self._portal, self._client, rows, terms, alike))
                output = run_in(opened, opened if is_kept else None)
            if is_kept:
                stack.pop_all()
                current_call().failed.callback(_close, weakref.ref(opened))
            return output

    @property
    def _prompts(self) -> int:
        """The positions of trainable prompts before every text."""
        return self.decoder.prompt_positions

    def _wants_gradients(self, inputs_embeds: torch.Tensor | None) -> bool:
        is_given = inputs_embeds is not None and inputs_embeds.requires_grad
        return torch.is_grad_enabled() and (is_given or any(each.requires_grad for each in self.parameters()))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The input of the first block, (rows, tokens, hidden_size), for whole rows of `input_ids` (rows, tokens).

        With `remote_blocks` and `score` it makes a forward of your own, through which gradients flow. Raises
        ConfigError for a token that is not one of the model's.
        """
        self._check_tokens(input_ids, None)
        ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        entry = entry_of(self.decoder.without_blocks(), self._connection.family)
        hidden: torch.Tensor = entry(input_ids=input_ids, position_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (rows, tokens, vocabulary) for `hidden` (rows, tokens, hidden_size), the output of the last block."""
        family = self._connection.family
        leaving = replace_decoder(self._now(), family, exit_of(self.decoder.without_blocks(), family))
        scores: torch.Tensor = leaving.forward(inputs_embeds=hidden, use_cache=False).logits
        return scores

    def _learn(self, **given: Any) -> CausalLMOutputWithPast:  # Any: arguments of transformers
        output: CausalLMOutputWithPast = self._now().forward(**given)
        return output

    def _now(self) -> Any:  # Any: of the family
        """transformers' own causal LM with the modules that are here now: a method of PEFT may have replaced some."""
        whole = shallow_copy(self._whole[0])
        whole._modules = dict(self._modules)
        return whole

    def _ends_now(self) -> list[tuple[int, int, int]]:
        """Another value when parameters of the ends have been changed, added or replaced; prompts are none."""
        return state_of(self._modules, self.remote_blocks, MODULES)

    def _current_ends(self) -> SharedEnds:
        """The ends as they are now: a trainer, or a method of PEFT, may have changed them."""
        if (state := self._ends_now()) != self._state_of_ends:
            self._state_of_ends = state
            if state == self._frozen_state:
                self._shared_ends = self._client.ends
            else:
                family, ends = self._connection.family, self._ends
                plain = replace_decoder(self._now(), family, self.decoder.without_blocks())
                changed = cut_ends(plain, family, ends.dtype, ends.vocabulary)
                self._shared_ends = SharedEnds(changed, self.tokenizer.token)
        return self._shared_ends

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises ConfigError, which names the token, if one of `token_ids` is not one of the model's."""
        self._connection.check_tokens(token_ids)

    def _check_tokens(self, input_ids: torch.Tensor, real: torch.Tensor | None) -> None:
        """Raises ConfigError as `check_tokens` does. Padding may be any token."""
        self.check_tokens((input_ids if real is None else input_ids[real]).flatten().tolist())

    def get_output_embeddings(self) -> torch.nn.Module:
        """The scoring layer as it is now."""
        module: torch.nn.Module = self._now().get_output_embeddings()
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
        most = self.info.context_tokens - self._prompts
        if most < generation_config.max_length == self.generation_config.max_length:  # it is the model's own file's
            warnings.warn(f"texts end at {most} tokens, the model's context, and not at its max_length", stacklevel=2)
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
            sessions.grow_to(max_cache_length)
            return
        call = current_call()
        self._check_context(max_cache_length + 1 + self._prompts)
        if (made := model_kwargs.get(CACHE)) is not None:  # the caller's, or of the class that was asked for
            opened = self._opened_for(made, rows, max_cache_length + 1, alike)
            call.failed.callback(setattr, made, "layers", made.layers)
            adopt(made, opened)
        else:
            opened = model_kwargs[CACHE] = self._open_cache(max_cache_length + 1, rows, alike, grows=True)
        call.failed.callback(opened.close)
        opened.grow_to(max_cache_length)
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
        most_text = self.info.context_tokens - self._prompts
        return self._open_cache(min(most or max_length, most_text), rows, alike, grows=most is None)

    def _open_cache(
        self, max_length: int, rows: int, alike: int = 1, priority: str | None = None, **terms: Any
    ) -> SessionCache:
        if priority is not None and priority not in PRIORITIES:
            raise ConfigError(f"there is no priority {priority!r}: choose one of {', '.join(PRIORITIES)}")
        max_length += self._prompts if terms.get("has_prompts", True) else 0
        self._check_context(max_length)
        firsts = [row - row % alike for row in range(rows)]
        of_priority = None if priority is None else PRIORITIES[priority]
        made = self._cache_terms(max_length, rows, priority=of_priority, **terms)
        return SessionCache(self._portal, self._client, rows, made, firsts)

    def _cache_terms(self, max_length: int, rows: int, *, has_prompts: bool = True, **terms: Any) -> CacheTerms:
        """With the adapters of the rows, and the prompts, as they are now."""
        made = CacheTerms(max_length, adapters=self.remote_blocks.adapters(rows), **terms)
        prefix = self.decoder.prefix if has_prompts else None
        return made if prefix is None else replace(made, prefix=prefix.embedded.detach(), prompts=prefix.deep_now())

    def _check_context(self, positions: int) -> None:
        if not 0 <= positions <= self.info.context_tokens:
            raise ConfigError(f"{positions} positions do not fit the model's context of {self.info.context_text}")


def _close(cache: weakref.ref[SessionCache]) -> None:
    """End its sessions if it is still there."""
    if (found := cache()) is not None:
        found.close()
