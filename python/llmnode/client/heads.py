"""Heads of transformers over remote blocks: a class or a number for each sequence, or for each token.

The class of a model with a head is that of its family, with its pooling, dropout and losses. The decoder in it is the
distributed one. So parameters have the names of transformers, and a head that PEFT saves fits its own models.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from llmnode.client.distributed import Distributed
from llmnode.errors import ConfigError
from llmnode.models.load import load_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmnode.client.distributed import Connection

_SEQUENCES = "sequence-classification"
HEADS: dict[str, Any] = {  # Any: transformers' classes have no common base
    _SEQUENCES: AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
}
_TASKS = {_SEQUENCES: "text-classification"}
"""The hub's names of tasks, where they are other ones."""


def make_head(connection: Connection, head: str, options: Mapping[str, object]) -> Any:  # Any: made for the family
    """A model with a new `head`, one of `HEADS`. `options` are attributes of its config, such as `num_labels`.

    Raises ConfigError for a head that there is not, or that transformers does not have for this family, and for an
    option that the config does not have.
    """
    if head not in HEADS:
        raise ConfigError(f"there is no head {head!r}: choose one of {', '.join(HEADS)}")
    config, kind = connection.folder.config, HEADS[head]
    if type(config) not in kind._model_mapping:
        raise ConfigError(f"transformers has no {head} for models of the family {config.model_type!r}")
    if unknown := [name for name in options if not hasattr(config, name)]:
        raise ConfigError(f"the config of this model has no {', '.join(unknown)}")
    model = load_head(connection.folder, connection.ends, kind, options)
    model = connection.distribute(model, model.config)
    own: Any = type(model)  # Any: a class is hashable, which mypy does not see
    model.__class__ = _distributed(own)
    model._connection = connection
    model._task = _TASKS.get(head, head)
    if head == _SEQUENCES:
        model.register_forward_pre_hook(_check_pooled, with_kwargs=True)
    return model


@cache
def _distributed(kind: type[Any]) -> type[Any]:
    """The class of a family's models with a head, for remote blocks."""
    return type(f"Distributed{kind.__name__}", (Distributed, kind), {})


def _check_pooled(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ConfigError if the head would read a column of padding, for which there are no hidden states.

    transformers pools the last token that is not `pad_token_id`; the last column if it is given embeddings.
    """
    given = signature(model.forward).bind_partial(*args, **kwargs).arguments
    mask, ids, padding = given.get("attention_mask"), given.get("input_ids"), model.config.pad_token_id
    if mask is None or mask.ndim != 2:
        return
    last = torch.full((len(mask),), mask.shape[1] - 1)
    if ids is not None and padding is not None:
        last = (torch.arange(ids.shape[1]) * (ids.cpu() != padding)).argmax(dim=1)
    if wrong := [row for row, column in enumerate(last.tolist()) if not mask[row, column]]:
        raise ConfigError(
            f"row {wrong[0]} ends in padding, where the head reads: pad on the left, or give input_ids in which "
            "padding is the config's pad_token_id"
        )
