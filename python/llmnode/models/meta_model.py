"""transformers models without weights, and without the modules that a part of them does not need."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from llmnode.errors import ModelError
from llmnode.models.sources.damage import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmnode.models.families import Family
    from llmnode.models.sources.folder import ModelFolder

    Attention = Callable[..., tuple[torch.Tensor, object]]

ATTENTIONS: dict[str, Attention] = {}
"""Attention functions of ours, by the names that transformers is to know them by."""


def without_weights(
    folder: ModelFolder,
    family: Family,
    attention: str,
    dtype: torch.dtype,
    kind: Any = None,  # Any: transformers' AutoModelForSequenceClassification and the like
    options: Mapping[str, object] | None = None,
) -> Any:  # Any: as transformers types them
    """The causal LM, or another `kind` of model. Its parameters have no storage. Its buffers, which no file has, are
    computed. `options` change its config.

    Raises ModelError if transformers makes no model of the config.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    for name, function in ATTENTIONS.items():
        AttentionInterface.register(name, function)
    config = copy.deepcopy(folder.config)  # transformers writes into it
    config.update(dict(options or {}))
    config.return_dict = True  # the client decides what its caller gets
    for output in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(config, output, False):
            setattr(config, output, False)
    if folder.info.blocks > len(folder.files):  # else a slip in a config has a model made without end
        raise ModelError(
            f"{folder.config_file} tells of {folder.info.blocks} blocks, and all files together have "
            f"{len(folder.files)} tensors: they are of different models, get both again"
        )
    known = "eager" if family.own_attention else attention
    try:
        with _one_model, _WithoutStorage(), _NothingDrawn():
            model = (kind or AutoModelForCausalLM).from_config(
                config, dtype=dtype, attn_implementation=known, trust_remote_code=False
            )
    except Exception as error:  # sizes that do not fit each other bring transformers and torch to raise anything
        raise ModelError(
            f"transformers makes no model of {folder.config_file} ({type(error).__name__}: {one_line(error)}): "
            "get it again"
        ) from error
    model.config._attn_implementation = attention  # by which the decoder knows whether to make a mask
    return model.eval()  # dropout is for training


_one_model = threading.Lock()
"""transformers sets torch's default dtype while it makes a model, for all threads."""


class _WithoutStorage:
    """In its context, in this thread alone, parameters of modules lose their storage.

    `accelerate.init_empty_weights` does so in all threads, and for ever if two of them overlap: a program may make
    models of its own meanwhile.
    """

    _here = threading.local()

    def __enter__(self) -> None:
        self._here.is_entered = True

    def __exit__(self, *_error: object) -> None:
        self._here.is_entered = False

    @classmethod
    def take(cls, _module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        """Returns the parameter that the module gets; None for the same one."""
        if not getattr(cls._here, "is_entered", False):
            return None
        made = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        made.__dict__.update({name: each for name, each in vars(parameter).items() if name not in vars(made)})
        return made


# It stays there: torch looks through its hooks in all threads, so none may come or go.
register_module_parameter_registration_hook(_WithoutStorage.take)  # type: ignore[arg-type] # torch takes a parameter


class _NothingDrawn(TorchFunctionMode):
    """In its context, in this thread alone, no normal numbers are drawn for parameters without storage.

    transformers initializes each parameter. Torch does that in Python if there is no storage, and it takes most of the
    time of making a model.
    """

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: as torch calls it, for any of its functions
        given = kwargs or {}
        if getattr(func, "__name__", None) == "normal_":  # that of torch or of transformers
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def remove_entry(decoder: Any, family: Family) -> None:  # Any: likewise, from here on
    setattr(decoder, family.tokens, None)
    for name in family.enter:
        setattr(decoder, name, torch.nn.Identity())
    if family.positions is not None:
        setattr(decoder, family.positions, _NoPositions())
    if family.multiplier is not None:
        setattr(decoder, family.multiplier, 1.0)


def remove_exit(decoder: Any, family: Family) -> None:
    for name in family.leave:
        setattr(decoder, name, torch.nn.Identity())


def remove_blocks(decoder: Any, family: Family) -> None:
    setattr(decoder, family.blocks, torch.nn.ModuleList())
    # The blocks keep the whole model's config; the loop over them reads this one.
    decoder.config = copy.deepcopy(decoder.config)
    decoder.config.num_hidden_layers = 0


@torch.inference_mode()
def check_transparent(folder: ModelFolder, decoder: Any, dtype: torch.dtype) -> None:
    """Without entry, blocks and exit, a decoder must not change its input. Else every span would change it again."""
    hidden = torch.linspace(-2, 2, 3 * folder.info.hidden_size, dtype=dtype).view(3, -1)
    if not torch.equal(run_embedded(decoder, hidden).last_hidden_state[0], hidden):
        raise ModelError(
            f"the family {folder.config.model_type!r} in this version of transformers changes hidden states "
            "before or after the blocks in a way that we do not know: use another version of transformers"
        )


def run_embedded(module: torch.nn.Module, hidden: torch.Tensor) -> Any:
    """Run a model without blocks; the positions do not matter."""
    positions = torch.arange(len(hidden))
    return module(inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False)


class _NoPositions(torch.nn.Module):
    """In the place of learned position embeddings, which the ends have added already."""

    def __init__(self) -> None:
        super().__init__()
        self.none = torch.nn.Buffer(torch.zeros((), dtype=torch.float32), persistent=False)  # where the blocks are

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self.none
