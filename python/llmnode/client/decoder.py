"""A transformers model without its head, through which gradients flow: its blocks are in the swarm.

Embeddings and the last norm are here, under the names that transformers gives them. `RemoteBlocks` is in the place of
the blocks. So a head of transformers, or a method of PEFT, finds the model that it knows. A forward here opens no
session, and keeps no keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedModel

from llmnode.client.adopted import PREFIXES
from llmnode.client.batch import Past, read_batch
from llmnode.client.forward import all_states, are_last_normed, chosen_states, given_states
from llmnode.client.prompt_tuning import DEEP_PROMPTS, MODULES, PROMPTS, Prefix, Prefixed, Sizes, make_prompts
from llmnode.client.versions import CACHE
from llmnode.errors import ConfigError
from llmnode.models.decoder_parts import entry_of, exit_of, shallow_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

    from llmnode.client.batch import PaddedBatch, Positions
    from llmnode.client.remote_blocks import RemoteBlocks
    from llmnode.models.families import Family

IGNORED = frozenset({"num_items_in_batch", "is_causal", "cache_position", "token_type_ids"})
"""Arguments of heads that a decoder takes and does not need."""


class DistributedDecoder(PreTrainedModel):
    """Embeddings, remote blocks and last norm. It is always as after `eval()`, but for what PEFT adds to it."""

    _supports_sdpa = True  # of the ends, which have no attention

    def __init__(
        self,
        config: PreTrainedConfig,
        plain: Any,  # Any: as transformers types a decoder
        family: Family,
        blocks: RemoteBlocks,
        positions: Positions,
        check_tokens: Callable[[torch.Tensor], None],
    ) -> None:
        """`plain` is the decoder of transformers without blocks. `check_tokens` refuses ids that the model lacks."""
        super().__init__(config)
        self._plain = [plain]  # in a list it is no child of ours
        self._family = family
        self._positions = positions
        self._check_tokens = check_tokens
        for name, module in plain._modules.items():
            self.add_module(name, module)
        self._own = [*self.children()]
        setattr(self, family.blocks, blocks)
        self.embedding_size = int(self.get_input_embeddings()(torch.zeros(1, dtype=torch.long)).shape[-1])
        """The size of `inputs_embeds`, which some models widen."""

    @property
    def blocks(self) -> RemoteBlocks:
        """All blocks of the model."""
        blocks: RemoteBlocks = getattr(self, self._family.blocks)
        return blocks

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: Any = None,  # Any: whatever a caller says
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:  # Any: the output of each family's decoder
        """Whole rows through the model: `last_hidden_state` (rows, columns, hidden_size), as transformers gives it.

        The arguments are transformers', and those of `DistributedModelForCausalLM.forward`. Hidden states of padding
        are zero. `use_cache` is ignored. With `return_dict=False` the output is a tuple. Raises ConfigError, before
        anything is computed, for a use that servers cannot do, and NoRoute or SessionLost as `RemoteBlocks.forward`.
        """
        check_cacheless(others.pop(CACHE, None), None)
        others = {name: value for name, value in others.items() if name not in IGNORED}
        if wrong := [name for name, value in others.items() if value is not None and value is not False]:
            raise ConfigError(f"not supported by a distributed model: {', '.join(wrong)}")
        given = given_states(input_ids, inputs_embeds, self.embedding_size)
        past = Past.empty(len(given), self.prompt_positions)
        batch = read_batch(past, given.shape[1], attention_mask, position_ids, self._positions)
        if input_ids is not None:
            self._check_tokens(given[batch.real])
            given = given.masked_fill(~batch.real, 0)  # padding may be any number
        else:
            given = given.float()
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        plain = self.without_blocks()
        entry, leaving = entry_of(plain, self._family), exit_of(plain, self._family)
        chosen = chosen_states(asked, entry, len(self.blocks))
        name = "inputs_embeds" if input_ids is None else "input_ids"
        ids, real, prefix, prefixed = _position_ids(batch), batch.real, self.prefix, None
        if prefix is not None:
            if (longest := prefix.positions + batch.longest) > (most := self.blocks.context_tokens):
                raise ConfigError(f"{longest} positions in a row with its prompts: the model's context is {most}")
            embedded = given if input_ids is None else self.get_input_embeddings()(given)
            prefixed = Prefixed.of(prefix, embedded, real, ids)
            given, real, ids, name = prefixed.embedded, prefixed.real, prefixed.position_ids, "inputs_embeds"
        entered = entry(**{name: given}, position_ids=ids, use_cache=False).last_hidden_state
        left = self.blocks(entered, real, None if prefix is None else prefix.deep)
        output = leaving(inputs_embeds=left, position_ids=ids, use_cache=False)
        output.last_hidden_state = output.last_hidden_state * real[..., None]
        if prefixed is not None:
            entered, left = prefixed.columns_of(entered), prefixed.columns_of(left)
            output.last_hidden_state = prefixed.columns_of(output.last_hidden_state)
        if chosen is not None:
            last = output.last_hidden_state if are_last_normed(self.config.get_text_config(), entry) else left
            output.hidden_states = all_states(entered, last, len(self.blocks), chosen)
        return output.to_tuple() if return_dict is False else output

    def tune_prompts(self, tuning_mode: str | None, pre_seq_len: int) -> None:
        """See `Distributed.tune_prompts`."""
        blocks, deviation = self.blocks, float(getattr(self.config, "initializer_range", 0.02))
        sizes = Sizes(self.embedding_size, blocks.hidden_size, len(blocks), blocks.context_tokens, deviation)
        made = {} if tuning_mode is None else make_prompts(tuning_mode, pre_seq_len, sizes)
        for name in MODULES:
            self._modules.pop(name, None)
        for name, module in made.items():
            self.add_module(name, module)

    @property
    def prefix(self) -> Prefix | None:
        """The trainable prompts as they are now, if there are any."""
        if (prompts := self._modules.get(PROMPTS)) is None:
            return None
        return Prefix.of(prompts, self._modules.get(DEEP_PROMPTS), self.blocks.hidden_size)

    @property
    def prompt_positions(self) -> int:
        """How many trainable prompts there are before every text."""
        prompts: Any = self._modules.get(PROMPTS)  # Any: torch types attributes of modules widely
        return 0 if prompts is None else int(prompts.num_embeddings)

    def without_blocks(self) -> Any:  # Any: likewise
        """The decoder of transformers, with the modules that are here now: a method of PEFT may have replaced some."""
        plain = shallow_copy(self._plain[0])
        plain._modules = {**self._modules, self._family.blocks: torch.nn.ModuleList()}
        return plain

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """The servers' part, as far as this class is concerned. transformers asks, and would read our source."""
        return True

    def train(self, mode: bool = True) -> Self:
        """Have what was added to the model, as the methods of PEFT do, be in training. The model itself never is."""
        super().train(mode)
        for module in self._own:
            module.eval()
        return self

    def get_input_embeddings(self) -> torch.nn.Module:
        module: torch.nn.Module = getattr(self, self._family.tokens)
        return module


def check_cacheless(cache: object, use_cache: bool | None) -> None:
    """Raises ConfigError for a cache of a forward with gradients. Keys and values of PEFT's prefixes are one too."""
    if cache is not None:
        raise ConfigError(
            f"gradients do not go through a cache: leave the cache out, or call under torch.no_grad(). {PREFIXES}"
        )
    if use_cache:
        raise ConfigError("use_cache=True: a forward with gradients keeps no cache. Call under torch.no_grad()")


def _position_ids(batch: PaddedBatch) -> torch.Tensor:
    """Those of all columns, (rows, columns); of padding 0."""
    ids = torch.zeros(batch.real.shape, dtype=torch.long)
    ids[batch.real] = torch.cat([*batch.position_ids])
    return ids
