"""From the names in a model's files to the tensors of a transformers model.

Files may name and cut tensors otherwise than the model: by another prefix, an expert at a time, under an old name.
transformers knows how to convert each of its models on load. The same rules are applied here, but only to the wanted
tensors.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from llmnode.errors import ModelError
from llmnode.models.families import family_of
from llmnode.models.meta_model import without_weights
from llmnode.models.sources.damage import one_line
from llmnode.models.sources.missing import check_complete
from llmnode.models.weights.packed_linear import HALVES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Set

    from llmnode.models.blueprint import BlockPlan
    from llmnode.models.sources.folder import ModelFolder

_PREFIX = "model."
_LAYERS = f"{_PREFIX}layers."


def read_parameters(
    folder: ModelFolder, model: Any, names: Set[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:  # Any: transformers types its models so
    """The parameters `names` of the weightless `model`, as far as the folder has them.

    Raises ModelError if a tensor is not of the shape that the config says.
    """
    expected = model.state_dict()
    plain: dict[str, str] = {}
    converted: dict[str, _Conversion] = {}
    for stored, name, converter, pattern in _matches(folder, model, expected):
        if name not in names:
            continue
        if converter is None:
            plain.setdefault(name, stored)
        else:
            converted.setdefault(name, _Conversion(converter)).add(stored, pattern)
    by_stored_name = folder.read(dict.fromkeys(plain.values(), dtype))
    tensors = {name: by_stored_name[stored] for name, stored in plain.items()}
    for name, conversion in converted.items():
        tensors |= conversion.run(name, folder, model, dtype)
    _check_shapes(folder, tensors, expected)
    return tensors


def read_block(folder: ModelFolder, index: int, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a block of the Llama kind, by their names in it, as the `expected` ones' dtypes.

    Raises ModelError if one is missing, or not of the `expected` one's shape.
    """
    full = {name: _full_name(index, name) for name in expected}
    if (stored := _stored_names(folder, full.values())) is None:
        (dtype,) = {each.dtype for each in expected.values()}
        model = without_weights(folder, family_of(folder.config), "eager", dtype)
        tensors = read_parameters(folder, model, {*full.values()}, dtype)
        check_complete(folder, [each for each in full.values() if each not in tensors])
    else:
        read = folder.read({stored[full[name]]: each.dtype for name, each in expected.items()})
        tensors = {each: read[stored[each]] for each in full.values()}
    _check_shapes(folder, tensors, {full[name]: each for name, each in expected.items()})
    return {name: tensors[each] for name, each in full.items()}


def block_dtypes(
    folder: ModelFolder, index: int, plan: BlockPlan, dtype: torch.dtype, *, halves: bool
) -> dict[str, torch.dtype]:
    """The dtypes of a block's parameters in memory: `dtype`, but if `halves`, matrices that files have in 16 bits stay
    so.
    """
    dtypes = dict.fromkeys(plan.shapes, dtype)
    stored = _stored_names(folder, [_full_name(index, name) for name in plan.shapes]) if halves else None
    if stored is not None:
        for name in plan.shapes:
            if len(plan.shapes[name]) > 1:
                dtypes[name] = HALVES.get(folder.dtypes[stored[_full_name(index, name)]], dtype)
    return dtypes


def _stored_names(folder: ModelFolder, names: Iterable[str]) -> dict[str, str] | None:
    """The names of parameters in the files: the same, or without `model.`. None if only transformers' rules can tell.

    That is so if a parameter is not there by these names, or is there more than once.
    """
    stored = {}
    for name in names:
        known = [each for each in (name, name.removeprefix(_PREFIX), f"{_PREFIX}{name}") if each in folder.files]
        if len(known) != 1 or known[0].startswith(2 * _PREFIX):
            return None
        stored[name] = known[0]
    return stored


def _full_name(index: int, name: str) -> str:
    return f"{_LAYERS}{index}.{name}"


def _check_shapes(
    folder: ModelFolder, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{folder.path} holds {name} of shape {tuple(tensor.shape)}, "
                f"and its config asks for {tuple(expected[name].shape)}: they are of different models, get both again"
            )


class _Conversion:
    """Several stored tensors that become one, as an expert each that become all experts."""

    def __init__(self, converter: Any) -> None:  # Any: transformers' own, and not typed
        self._converter = deepcopy(converter)
        self._sources: list[tuple[str, str]] = []

    def add(self, stored: str, pattern: str) -> None:
        self._sources.append((stored, pattern))

    def run(self, name: str, folder: ModelFolder, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensors = folder.read({stored: dtype for stored, _ in self._sources})
        for stored, pattern in self._sources:
            self._converter.add_tensor(name, stored, pattern, tensors.pop(stored))
        try:
            made = self._converter.convert(name, model=model, config=model.config)
        except Exception as error:  # tensors that do not fit each other bring transformers to raise anything
            raise ModelError(
                f"{folder.path} holds parts of {name} that do not fit together ({one_line(error)}): download it again"
            ) from error
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def _matches(folder: ModelFolder, model: Any, expected: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, Any, str]]:
    """Each stored name, the parameter it is for, and where that is not all: the converter and its pattern."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    for stored in sorted(folder.files, key=dot_natural_key):  # experts in the order of their numbers
        name, pattern = rename_source_key(stored, renamings, converters, prefix, expected)
        if name not in expected and stored in expected:  # named as the model does, though a rule matches
            name, pattern = rename_source_key(stored, [], [], prefix, expected)
        yield stored, name, of_pattern[pattern] if pattern else None, pattern or ""
