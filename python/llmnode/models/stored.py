"""From the names in a model's files to the tensors of a transformers model.

Files may name and cut tensors otherwise than the model: by another prefix, an expert at a time, under a name of former
days. transformers knows how to convert each of its models on load, and the same rules are applied here, to the tensors
that are wanted alone.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError
from llmnode.models.narrow import HALVES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    import torch

    from llmnode.models.blueprint import BlockPlan
    from llmnode.models.folder import ModelFolder

_PREFIX = "model."
_LAYERS = f"{_PREFIX}layers."
_SHOWN = 4


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
    stored = _stored_names(folder, index, expected)
    check_complete(folder, [_full_name(index, name) for name, each in stored.items() if each not in folder.files])
    read = folder.read({each: expected[name].dtype for name, each in stored.items()})
    tensors = {_full_name(index, name): read[each] for name, each in stored.items()}
    _check_shapes(folder, tensors, {_full_name(index, name): each for name, each in expected.items()})
    return {name: tensors[_full_name(index, name)] for name in expected}


def block_dtypes(
    folder: ModelFolder, index: int, plan: BlockPlan, dtype: torch.dtype, *, halves: bool
) -> dict[str, torch.dtype]:
    """Of a block's parameters in memory: `dtype`, but if `halves`, matrices that files have in 16 bits stay so."""
    dtypes = dict.fromkeys(plan.shapes, dtype)
    if halves:
        for name, stored in _stored_names(folder, index, plan.shapes).items():
            if len(plan.shapes[name]) > 1:
                dtypes[name] = HALVES.get(folder.dtypes.get(stored, ""), dtype)
    return dtypes


def _stored_names(folder: ModelFolder, index: int, names: Iterable[str]) -> dict[str, str]:
    """Files name them with `model.`, or without."""
    full = {name: _full_name(index, name) for name in names}
    return {name: each if each in folder.files else each.removeprefix(_PREFIX) for name, each in full.items()}


def _full_name(index: int, name: str) -> str:
    return f"{_LAYERS}{index}.{name}"


def check_complete(folder: ModelFolder, missing: Sequence[str]) -> None:
    """Raises ModelError if any is `missing`."""
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelError(
            f"{folder.path} has no tensors for {', '.join(missing[:_SHOWN])}{more}: the folder is incomplete"
        )


def _check_shapes(
    folder: ModelFolder, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{folder.path} holds {name} of shape {tuple(tensor.shape)}, "
                f"and its config asks for {tuple(expected[name].shape)}: the folder is incomplete or mixed up"
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
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{folder.path} holds parts of {name} that do not fit together: {error}") from error
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
            name, pattern = stored, None
        yield stored, name, of_pattern[pattern] if pattern else None, pattern or ""
