"""The LoRA matrices that PEFT has put around absent layers, as an adapter that servers can hold.

An adapter is made anew when numbers of a matrix have changed, and only the parts of blocks whose matrices have. torch
counts no changes through `tensor.data`, and none by fused optimizers, so the numbers themselves are compared, by their
digests. PEFT itself is not imported: a client that uses it has done so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from llmnode import _native
from llmnode.client.absent_blocks import is_absent
from llmnode.client.row_adapters import is_of_rows, names_of_rows
from llmnode.core.adapters import MOST_RANK
from llmnode.errors import ConfigError, NumericOverflow
from llmnode.models.lora import Lora, matrices, pack_part, values_of
from llmnode.models.tensors import to_bytes
from llmnode.wire.adapter import make_adapter

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from llmnode.core.span import Span
    from llmnode.models.lora import Part
    from llmnode.wire.adapter import Adapter

_KIND = "peft.tuners.lora.layer", "Linear"
_OF_PARAMETER = "peft.tuners.lora.layer", "ParamWrapper"
MOST_MADE = 16
"""The adapters whose bytes are kept, for when they are wanted again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """The bytes of a part, and what they were made of."""

    state: Sequence[tuple[str, float, bytes, bytes]]
    """The digests of the matrices of each layer, by its name and scale."""
    content: tuple[bytes, int]
    largest: float
    """The size of its largest number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """An adapter, and the parts that it was made of, by their blocks."""

    packed: Mapping[int, _Packed] = field(default_factory=dict)
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The adapter of some rows of a batch, which may be none, and the updates that it has, by their blocks."""

    rows: Sequence[int]
    parts: Mapping[int, Part]
    adapter: Adapter | None
    dropouts: Collection[float] = ()
    """The probabilities with which its layers drop what goes into them."""

    @property
    def dropout(self) -> float:
        """The one of all layers. Raises ConfigError if they differ."""
        if len(self.dropouts) > 1:
            has = " and ".join(map(str, sorted(self.dropouts)))
            raise ConfigError(f"layers of one adapter have dropout of {has}: give all of them the same lora_dropout")
        return next(iter(self.dropouts), 0.0)


class BlockAdapters:
    """The adapters of all blocks of a model, as they are now. `blocks` are those of `absent_blocks`.

    Without one of PEFT it is `own`, that of the connection, which stays as it is.
    """

    def __init__(self, model_digest: bytes, blocks: Sequence[torch.nn.Module], own: Adapter | None = None) -> None:
        self._model_digest = model_digest
        self._own = own
        self.blocks = blocks
        self._paths = [[path for path, module in block.named_modules() if is_absent(module)] for block in blocks]
        self._made: dict[str | None, _Made] = {}
        """By PEFT's names; None for the active one. The last ones are those that were wanted last."""

    def chosen(self, rows: int) -> list[Chosen]:
        """The adapters of a batch of this many `rows`: one for all of them, or one for each name in `adapter_names`.

        Raises ConfigError for what servers cannot compute, and for another number of names.
        """
        layers = self._layers()
        names = _names_of_rows(layers, rows)
        found = []
        for name in dict.fromkeys(names):
            parts, dropouts = _parts(layers, name)
            adapter, own = self.adapter(parts, name), [row for row, each in enumerate(names) if each == name]
            found.append(Chosen(own, parts, adapter, dropouts))
        return found

    def adapter(self, parts: Mapping[int, Part], name: str | None = None) -> Adapter | None:
        """The adapter `name` that has these parts; the same one while they do not change. Without any, that of the
        connection.

        Raises ConfigError if there are both.
        """
        before = self._made.pop(name, _Made())
        packed = {index: _pack(index, part, before.packed.get(index)) for index, part in parts.items()}
        if packed and self._own is not None:
            raise ConfigError("blocks compute one adapter: connect without `adapter`, or disable that of PEFT")
        adapter = before.adapter
        if packed != before.packed:
            contents = {index: each.content for index, each in packed.items()}
            largest = max((each.largest for each in packed.values()), default=0.0)
            adapter = make_adapter(self._model_digest, contents, largest) if packed else None
        self._made[name] = _Made(packed, adapter)
        while len(self._made) > MOST_MADE:
            del self._made[next(iter(self._made))]
        return adapter if packed else self._own

    def _layers(self) -> list[tuple[int, str, Any]]:  # Any: PEFT's, if they are not ours
        """All linear layers: the block of each, its path there, and the layer."""
        return [
            (index, path, block.get_submodule(path))
            for index, (block, paths) in enumerate(zip(self.blocks, self._paths, strict=True))
            for path in paths
        ]


def _names_of_rows(layers: Sequence[tuple[int, str, Any]], rows: int) -> Sequence[str | None]:
    """The adapter of each row, None for the active one."""
    hooked = (names_of_rows(layer) for _, _, layer in layers if layer._forward_pre_hooks)
    found = {names for names in hooked if names is not None}
    if not found:
        return [None] * rows
    names, *others = found
    if others or len(names) != rows:
        raise ConfigError(f"adapter_names has {len(names)} names for {rows} rows: name one for each row")
    return names


def _parts(layers: Sequence[tuple[int, str, Any]], name: str | None) -> tuple[dict[int, Part], set[float]]:
    """The updates `name` of each block that has any, None for the active ones, and the dropout before them.

    Raises ConfigError as `chosen`.
    """
    found: dict[int, dict[str, Lora]] = {}
    dropouts = set()
    for index, path, layer in layers:
        if (update := _update(f"block {index}: {path}", layer, name)) is not None:
            found.setdefault(index, {})[path], dropout = update
            dropouts.add(dropout)
    return dict(found), dropouts


def _pack(index: int, part: Part, before: _Packed | None) -> _Packed:
    """`before` if the part has not changed since."""
    own = {
        name: Lora(lora.a.detach().float().cpu(), lora.b.detach().float().cpu(), lora.scale)
        for name, lora in part.items()
    }
    state = [(name, lora.scale, _digest(lora.a), _digest(lora.b)) for name, lora in own.items()]
    if before is not None and before.state == state:
        return before
    largest = 0.0
    for name, lora in own.items():
        sizes = [lora.a.abs().max().item(), lora.b.abs().max().item(), abs(lora.scale)]
        if not all(map(math.isfinite, sizes)):
            what = f"block {index}: {name}: the adapter has numbers that are not finite"
            raise NumericOverflow(f"{what}. Go back to one of before, and train with a smaller learning rate")
        largest = max(largest, *sizes)
    return _Packed(state, (pack_part(own), values_of(own)), largest)


def _digest(matrix: torch.Tensor) -> bytes:
    return _native.blake3_digest(to_bytes(matrix))


def trained_matrices(parts: Mapping[int, Part], span: Span) -> list[torch.Tensor]:
    """The matrices of the blocks of `span`, in the order in which servers give their gradients."""
    return [each for block in sorted(parts) if span.start <= block < span.end for each in matrices(parts[block])]


def _update(where: str, layer: Any, name: str | None) -> tuple[Lora, float] | None:  # Any: PEFT's, if it is not ours
    """The update `name` that PEFT has for a layer, and its dropout, or None. Without a name it is the active one.

    Raises ConfigError for any other than plain LoRA.
    """
    if is_absent(layer):
        _check_frozen(where, layer)
        return None
    if (type(layer).__module__, type(layer).__name__) == _OF_PARAMETER:
        what = f"the parameter {layer.parameter_name}, which is of no linear layer"
        raise ConfigError(f"{where}: servers compute no LoRA of {what}: name linear layers in target_modules")
    if (type(layer).__module__, type(layer).__name__) != _KIND:
        raise ConfigError(f"{where}: servers compute LoRA alone, and this is {type(layer).__name__}")
    if not is_absent(layer.get_base_layer()):
        raise ConfigError(f"{where}: the weights are with the servers: use an initialization that does not change them")
    _check_frozen(where, layer.get_base_layer())
    if layer._forward_hooks or not all(map(is_of_rows, layer._forward_pre_hooks.values())):
        raise ConfigError(f"{where}: a hook on it would not run, since the layer is with the servers: remove it")
    if layer.merged:
        raise ConfigError(f"{where}: an adapter cannot be merged into weights that are with the servers")
    wanted = layer.active_adapters if name is None else [name]
    active = [each for each in wanted if each in layer.lora_A]
    if layer.disable_adapters or not active:
        return None
    if len(active) > 1:
        raise ConfigError(f"{where}: {len(active)} adapters are active at once, and servers compute one")
    (name,) = active
    if layer.lora_variant.get(name) is not None or layer.lora_bias.get(name):
        raise ConfigError(f"{where}: servers compute plain LoRA, without DoRA, other variants or a bias")
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    if len(a) > MOST_RANK:
        raise ConfigError(f"{where}: a rank of {len(a)}, and servers take {MOST_RANK} at most")
    return Lora(a, b, float(layer.scaling[name])), _dropout(where, layer.lora_dropout[name])


def _dropout(where: str, module: torch.nn.Module) -> float:
    """The probability with which a module of PEFT drops a number now. Raises ConfigError for what servers do not do."""
    if not module.training or isinstance(module, torch.nn.Identity):
        return 0.0
    if type(module) is not torch.nn.Dropout or module.p >= 1:
        raise ConfigError(f"{where}: servers compute dropout of a probability below 1, and this is {module}")
    return float(module.p)


def _check_frozen(where: str, layer: torch.nn.Module) -> None:
    """Raises ConfigError if gradients are wanted for weights that are not here. PEFT wants those of biases if asked."""
    if torch.is_grad_enabled():
        for name, each in layer.named_parameters(recurse=False):
            if each.requires_grad:
                raise ConfigError(
                    f"{where}.{name} is with the servers, which keep it frozen: set its requires_grad to False (and "
                    "the bias of a PEFT config to 'none'), and train adapters, prompts, or what is here"
                )
