"""Modules in the place of blocks that are elsewhere: their layers, under their names and sizes, without weights.

PEFT wraps such a layer as any other. The matrices that it adds are real, and belong to the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers.pytorch_utils import Conv1D

from llmnode.errors import ConfigError
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.families import family_of
from llmnode.models.lora import targets_of
from llmnode.models.meta_model import without_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from llmnode.models.lora import Target
    from llmnode.models.sources.folder import ModelFolder

_MATRIX_DIMENSIONS = 2
_BYTES = 4
"""The memory of a weight that is not here."""


class _Absent(torch.nn.Module):
    """The common part of both kinds of layers. Their weights are in no state dict, and in none that is loaded."""

    _sizes: tuple[Any, ...]  # Any: what its class is made with

    def forward(self, _input: torch.Tensor) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError("this layer is with the servers: call the blocks that it is in")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A layer without weights, too. torch would fill the copy of a weight with numbers."""
        if not is_absent(self):
            raise ConfigError("the weights of this layer are with the servers: leave out those of your own")
        made = memo[id(self)] = type(self)(*self._sizes).train(self.training)
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *given: Any) -> None:
        if found := [name for name in state_dict if name.startswith(prefix)]:
            given[-1].append(f"{found[0]}: the weights of blocks are with the servers: leave out such tensors")


class _Part(torch.nn.Module):
    """A block or a module in it, with absent layers. A layer that PEFT puts around one of these refuses to merge."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(value, "get_base_layer") and is_absent(value.get_base_layer()):
            value.__dict__["merge"] = _refuse_merge
        super().__setattr__(name, value)


def _refuse_merge(*_args: object, **_options: object) -> NoReturn:
    raise ConfigError(
        "an adapter cannot be merged into weights that are with the servers: save it, and merge it where the whole "
        "model is"
    )


class AbsentLinear(_Absent, torch.nn.Linear):
    """A linear layer whose weights are with the servers: its weight has the shape, and four bytes of memory."""

    def __init__(self, inputs: int, outputs: int, has_bias: bool) -> None:
        torch.nn.Module.__init__(self)
        self._sizes = inputs, outputs, has_bias
        self.in_features, self.out_features = inputs, outputs
        self.weight = _absent(outputs, inputs)
        self.register_parameter("bias", _absent(outputs) if has_bias else None)


class AbsentConv1D(_Absent, Conv1D):
    """The same for GPT-2, whose layers have their weights the other way round."""

    def __init__(self, inputs: int, outputs: int, has_bias: bool) -> None:
        torch.nn.Module.__init__(self)
        self._sizes = inputs, outputs, has_bias
        self.nx, self.nf = inputs, outputs
        self.weight = _absent(inputs, outputs)
        self.register_parameter("bias", _absent(outputs) if has_bias else None)


class AbsentWeights(_Absent):
    """A module with other weights, as those of experts, of their router and of norms: PEFT can wrap it.

    Servers compute nothing that is added to them. `block_adapters.py` says so, where PEFT would only warn that there
    are none, or would train those of the client alone.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._sizes = (shapes,)
        for name, shape in shapes.items():
            self.register_parameter(name, _absent(*shape))


def is_absent(module: torch.nn.Module) -> bool:
    """Whether it is such a layer, and nobody has given it weights of its own."""
    own = [each for each in module._parameters.values() if each is not None] if isinstance(module, _Absent) else []
    return bool(own) and all(each.untyped_storage().nbytes() <= _BYTES for each in own)


def absent_blocks(folder: ModelFolder) -> list[torch.nn.Module]:
    """One module for each block of a model. Reads no weights. Raises ModelError as `load_span`."""
    blocks: list[torch.nn.Module] = []
    for layers in _layers(folder):
        block = _Part()
        for path, layer in layers.items():
            _put(block, path, layer)
        blocks.append(block)
    return blocks


def _layers(folder: ModelFolder) -> Iterator[Mapping[str, torch.nn.Module]]:
    """The linear layers of each block, and other modules with matrices, by their names in it."""
    if (blueprint := blueprint_of(folder)) is not None:
        for plan in blueprint.blocks:
            layers: dict[str, dict[str, Sequence[int]]] = {}
            for name, shape in plan.shapes.items():
                path, _, weight = name.rpartition(".")
                layers.setdefault(path, {})[weight] = shape
            yield {path: _absent_layer(shapes) for path, shapes in layers.items()}
        return
    family = family_of(folder.config)
    decoder = without_weights(folder, family, "eager", torch.float32).get_submodule(family.decoder)
    for block in getattr(decoder, family.blocks):
        linears = {name: _like(block.get_submodule(name), target) for name, target in targets_of(block).items()}
        others = _other_weights(block, linears)
        found = {**linears, **others}
        yield {path: found[path] for path, _ in block.named_modules() if path in found}


def _other_weights(block: torch.nn.Module, linears: Collection[str]) -> Mapping[str, torch.nn.Module]:
    """The modules of a block that have weights of their own and are none of its `linears`, by their names."""
    found = {}
    for path, module in block.named_modules():
        shapes = {name: each.shape for name, each in module.named_parameters(recurse=False)}
        if shapes and path and path not in linears:
            found[path] = AbsentWeights(shapes)
    return found


def _absent_layer(shapes: Mapping[str, Sequence[int]]) -> torch.nn.Module:
    weight = shapes.get("weight", ())
    if len(weight) != _MATRIX_DIMENSIONS:
        return AbsentWeights(shapes)
    return AbsentLinear(weight[1], weight[0], "bias" in shapes)


def _like(layer: torch.nn.Module, target: Target) -> torch.nn.Module:
    kind = AbsentLinear if isinstance(layer, torch.nn.Linear) else AbsentConv1D
    return kind(target.inputs, target.outputs, layer.bias is not None)


def _put(block: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
    *parents, name = path.split(".")
    module = block
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, _Part())
        module = module.get_submodule(parent)
    module.add_module(name, layer)


def _absent(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros((), dtype=torch.float32).expand(shape), requires_grad=False)
