"""Copies of a transformers model that share its modules: a decoder's entry and exit; one with another decoder."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from llmnode.models.meta_model import remove_entry, remove_exit

if TYPE_CHECKING:
    import torch

    from llmnode.models.families import Family


def entry_of(decoder: Any, family: Family) -> Any:  # Any: as transformers types one
    """A copy of a decoder without blocks, which shares its modules: all before the first block."""
    entry = shallow_copy(decoder)
    remove_exit(entry, family)
    return entry


def exit_of(decoder: Any, family: Family) -> Any:  # Any: as transformers types one
    """The same as `entry_of`: all after the last block."""
    leaving = shallow_copy(decoder)
    remove_entry(leaving, family)
    return leaving


def replace_decoder(model: Any, family: Family, decoder: torch.nn.Module) -> Any:  # Any: as transformers types one
    """A copy of a model, with or without a head, that has another `decoder` and shares its other modules."""
    parent, _, name = family.decoder.rpartition(".")
    copied = shallow_copy(model, parent)
    setattr(copied.get_submodule(parent), name, decoder)
    return copied


def shallow_copy(model: Any, path: str = "") -> Any:  # Any: as transformers types one
    """`model` with copies of itself and of the modules along `path`, which may be changed; all others are shared."""
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    name, _, rest = path.partition(".")
    if name:
        setattr(copied, name, shallow_copy(getattr(model, name), rest))
    return copied
