"""The base of all distributed models, whatever their head: the connection, and the uses that are refused."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from llmnode.client.absent_blocks import absent_blocks
from llmnode.client.batch import Positions
from llmnode.client.block_adapters import BlockAdapters
from llmnode.client.decoder import DistributedDecoder
from llmnode.client.named_base import facts_of, name_base, tags_of
from llmnode.client.remote_blocks import RemoteBlocks
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.models.decoder_parts import replace_decoder
from llmnode.models.families import family_of
from llmnode.models.sources.checkpoint import ADAPTER_WEIGHTS_FILE
from llmnode.session.passes import SwarmPasses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from transformers import PreTrainedConfig

    from llmnode.client.connect import Client
    from llmnode.client.portal import Portal
    from llmnode.core.model import ModelInfo
    from llmnode.core.route import Route
    from llmnode.core.traffic import Traffic
    from llmnode.models.load import Ends
    from llmnode.models.sources.folder import ModelFolder
    from llmnode.models.text.tokenizer import Tokenizer

_EMBEDDINGS = "embeddings.word_embeddings"
_OF_SAVING = {"push_to_hub": False, "variant": None, "safe_serialization": True, "save_peft_format": True}
"""Options of transformers' `save_pretrained`, and the only values that they may have."""
_MEANINGLESS = frozenset({"max_shard_size", "token", "save_original_format", "distributed_checkpoint"})
"""Those that would change nothing in one file of what is trained."""
_NOT_HERE = (
    "the weights of the blocks are not here: push a model of PEFT (`peft.get_peft_model(model, ...).push_to_hub`), or "
    "upload the folder that save_pretrained writes"
)


class Connection:
    """The swarm, and the client's part of the model, for all models of one connection. `stack` ends it."""

    def __init__(self, folder: ModelFolder, ends: Ends, client: Client, portal: Portal, stack: ExitStack) -> None:
        self.folder = folder
        self.ends = ends
        self.client = client
        self.portal = portal
        self.family = family_of(folder.config)
        self.positions = Positions(
            folder.config, learned=None if self.family.positions is None else client.model.context_tokens
        )
        self.close = stack.close
        self._passes = SwarmPasses(client.router.finder, client.codec)

    @property
    def shared(self) -> Sequence[object]:
        """The objects that all copies of a model share."""
        return self, self.client, self.portal, self.ends, self._passes

    def blocks(self) -> RemoteBlocks:
        """All blocks of the model."""
        model = self.client.model
        adapters = BlockAdapters(model.digest, absent_blocks(self.folder), self.client.adapter)
        return RemoteBlocks(self.portal, self._passes, Span(0, model.blocks), adapters)

    def distribute(self, whole: Any, config: PreTrainedConfig) -> Any:  # Any: as transformers types its models
        """A copy of `whole`, a model of transformers without blocks, whose decoder's blocks are in the swarm."""
        plain = whole.get_submodule(self.family.decoder)
        decoder = DistributedDecoder(
            config, plain, self.family, self.blocks(), self.positions, lambda ids: self.check_tokens(ids.tolist())
        )
        return replace_decoder(whole, self.family, decoder)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises ConfigError, which names the token, if one of `token_ids` is not one of the model's."""
        self.client.ends.check(token_ids)


class Distributed(PreTrainedModel):
    """A transformers model whose blocks are in the swarm; to be mixed into one with a head.

    The client's part is differentiable, and frozen at first. Nothing in it drops out in training; the dropout of heads
    and of PEFT's methods works.
    """

    supports_gradient_checkpointing = True  # servers keep nothing, and compute blocks again
    _supports_sdpa = True  # of the ends, which have no attention
    _connection: Connection
    _task = "text-generation"

    @property
    def info(self) -> ModelInfo:
        """The model's name, digest and sizes."""
        return self._connection.client.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._connection.client.tokenizer

    @property
    def decoder(self) -> DistributedDecoder:
        """The model without its head, through which gradients flow."""
        decoder = self.get_submodule(self._connection.family.decoder)
        assert isinstance(decoder, DistributedDecoder), "`Connection.distribute` has put it there"
        return decoder

    @property
    def remote_blocks(self) -> RemoteBlocks:
        """The blocks as a module of torch, through which gradients flow: `model.remote_blocks[3:7](hidden)`."""
        return self.decoder.blocks

    def tune_prompts(self, tuning_mode: str | None, pre_seq_len: int = 0) -> None:
        """Put `pre_seq_len` trainable prompts before every text, as Petals' models do. They are new; None removes them.

        With `tuning_mode` "ptune" they stand for embeddings of tokens. With "deep_ptune" more of them are added to the
        hidden states at their positions, before each block. They are the parameters `prompt_embeddings` and
        `intermediate_prompt_embeddings` of the decoder; scores and states of outputs are those of the text alone.
        Raises ConfigError for another mode, and for prompts that do not fit the model's context.
        """
        self.decoder.tune_prompts(tuning_mode, pre_seq_len)
        self.config.tuning_mode, self.config.pre_seq_len = tuning_mode, pre_seq_len

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm: end every session and connection. Safe to call twice."""
        self._connection.close()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its computation and hidden states, independent of the form of its weights."""
        return self._connection.ends.dtype

    @property
    def route(self) -> Route:
        """The hops of the session that was opened last; before that, those that one would take."""
        return self._connection.client.route

    @property
    def traffic(self) -> Traffic:
        """Bytes of hidden states that have crossed our links, for all models and sessions of this connection."""
        return self._connection.client.traffic

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Sequence[str]:
        """The parameters that are with the servers, by the names that this model and one of PEFT around it have.

        torch's DistributedDataParallel, which accelerate uses for several processes, asks a model for this, and makes
        all others the same in all processes.
        """
        absent = [name for name, each in self.named_parameters() if each.untyped_storage().nbytes() < each.nbytes]
        return [f"{prefix}{name}" for prefix in ("", "base_model.model.") for name in absent]

    def tie_weights(self, *_args: Any, **_kwargs: Any) -> None:
        """Tied weights have been read as one."""

    @property
    def model_tags(self) -> list[str]:  # type: ignore[override]  # an attribute of transformers, which nobody sets
        """The tags of adapters on the hub: their base, its revision and digest, and the task. Others may be added.

        PEFT asks for them when it saves an adapter, before it writes the adapter's config. So that has the revision.
        """
        self._name_base()
        return self._tags

    @cached_property
    def _tags(self) -> list[str]:
        return tags_of(self.info, self._task)

    def _name_base(self) -> None:
        name_base(getattr(self, "peft_config", {}).values(), self.info)

    def save_pretrained(  # type: ignore[override]  # other options are refused
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Write the parameters that are trained, and no others, to a file in the folder `save_directory`.

        It is `model.safetensors`, which a trainer of transformers loads when it resumes. A model of PEFT has a
        `save_pretrained` of its own, in PEFT's format. An adapter of `add_adapter` is written in that format, too. The
        values are those in `state_dict`, if it is given. Only the main process writes. Raises ConfigError if no
        parameter requires gradients, since the weights of the blocks are with the servers; and for `options` of
        transformers that would change what is written, or push it.
        """
        if options.get("push_to_hub"):
            raise ConfigError(_NOT_HERE)
        others = {name: value for name, value in options.items() if name not in _MEANINGLESS}
        if wrong := [name for name, value in others.items() if (name, value) not in _OF_SAVING.items()]:
            raise ConfigError(f"what is trained is written as it is, in safetensors: leave out {', '.join(wrong)}")
        here = {name: each for name, each in self.named_parameters() if each.untyped_storage().nbytes() >= each.nbytes}
        given = state_dict or {}
        trained = {
            name: given.get(name, each).detach().contiguous() for name, each in here.items() if each.requires_grad
        }
        if not trained:
            raise ConfigError("nothing here is trained, and the blocks are with the servers: copy the model's folder")
        if not is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trained, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt", **facts_of(self.info)})
        if getattr(self, "_hf_peft_config_loaded", False):
            found = self.get_adapter_state_dict(state_dict=state_dict)
            adapter = {f"base_model.model.{name}": each for name, each in found.items()}
            save_file(adapter, folder / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
            self._name_base()
            self.peft_config[self.active_adapters()[0]].save_pretrained(folder)

    def push_to_hub(self, *_args: Any, **_kwargs: Any) -> NoReturn:  # type: ignore[override]  # theirs is wrapped
        """Raises ConfigError: share what PEFT saves."""
        raise ConfigError(_NOT_HERE)

    def resize_token_embeddings(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raises ConfigError: servers and other clients have the model as it is."""
        raise ConfigError("a served model cannot be changed: change its folder, and serve that")

    set_input_embeddings = set_output_embeddings = resize_token_embeddings

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **_options: Any) -> None:
        """Do nothing, with or without `gradient_checkpointing_kwargs`: servers compute blocks again in a backward."""

    def activation_checkpointing_enable(self, *_args: Any, **_options: Any) -> None:
        """Do nothing, for the same reason."""

    gradient_checkpointing_disable = activation_checkpointing_disable = activation_checkpointing_enable

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.decoder.get_input_embeddings()

    def get_submodule(self, target: str) -> torch.nn.Module:
        """The module at the path `target`. PEFT asks for the input embeddings by a name of its own."""
        return self.get_input_embeddings() if target == _EMBEDDINGS else super().get_submodule(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model with parameters of its own, over the same connection: `close` ends both."""
        shared = self._connection.shared
        memo |= {id(each): each for each in shared}
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """The function that `to`, `half`, `cuda` and the like call. Raises ConfigError if it would change anything."""
        here = torch.empty(1, dtype=self.dtype)
        there = fn(here)
        if (there.dtype, there.device) != (here.dtype, here.device):
            raise ConfigError(f"the client's part of the model stays on the CPU in {self.dtype}: leave out the change")
        return self


def _name_base_of_prompts(holder: torch.nn.Module, _name: str, _child: torch.nn.Module | None) -> None:
    """Prompts of PEFT have their config in PEFT's model, the `holder`, and there before modules of them are added."""
    base = holder._modules.get("base_model")
    if isinstance(base, Distributed) and type(holder).__module__ == "peft.peft_model":
        configs: Any = holder.peft_config  # Any: PEFT's model is not imported
        name_base(configs.values(), base.info)


# It stays there: torch looks through its hooks in all threads, so none may come or go.
register_module_module_registration_hook(_name_base_of_prompts)
