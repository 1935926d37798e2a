"""A distributed model answers as its family does when PEFT, TRL and trainers ask it about itself."""

from __future__ import annotations

from typing import Any

_OF_THE_FAMILY = (
    "base_model_prefix",  # without it `base_model` is the model itself, and TRL finds no `last_hidden_state`
    "config_class",
    "_tied_weights_keys",  # PEFT changes a tied head with the embedding
    "all_tied_weights_keys",
    "_no_split_modules",
    "_skip_keys_device_placement",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save",
    "vocab_size",
)


def take_attributes(model: Any, family: Any) -> None:  # Any: as transformers types its models
    """Give `model` the attributes that `family`, a model of transformers' own class, has for such questions."""
    for name in _OF_THE_FAMILY:
        if hasattr(family, name):
            setattr(model, name, getattr(family, name))
