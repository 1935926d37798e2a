"""The LoRA matrices that PEFT has put around absent layers, as an adapter that servers can hold.

An adapter is made anew when a matrix has changed, which torch counts (`Tensor._version`), and only the parts of blocks
whose matrices have. PEFT itself is not imported: a client that uses it has done so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmnode.client.absent_blocks import is_absent
from llmnode.core.adapters import MOST_RANK
from llmnode.errors import ConfigError
from llmnode.models.lora import Lora, matrices, pack_part, values_of
from llmnode.models.tensors import version_of
from llmnode.wire.adapter import make_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.span import Span
    from llmnode.models.lora import Part
    from llmnode.wire.adapter import Adapter

_KIND = "peft.tuners.lora.layer", "Linear"


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """The bytes of a part, and what they were made of."""

    state: tuple[tuple[object, ...], ...]
    part: Part
    """Kept, so that no other tensor gets the id of one of its matrices."""
    content: tuple[bytes, int]


class BlockAdapters:
    """The adapter of all blocks of a model, as it is now. `blocks` are those of `absent_blocks`.

    Without one of PEFT it is `own`, that of the connection, which stays as it is.
    """

    def __init__(self, model_digest: bytes, blocks: Sequence[torch.nn.Module], own: Adapter | None = None) -> None:
        self._model_digest = model_digest
        self._own = own
        self.blocks = blocks
        self._paths = [[path for path, module in block.named_modules() if is_absent(module)] for block in blocks]
        self._packed: dict[int, _Packed] = {}
        self._adapter: Adapter | None = None

    def parts(self) -> dict[int, Part]:
        """The active updates of each block that has any. Raises ConfigError for those that servers cannot compute."""
        found: dict[int, Part] = {}
        for index, (block, paths) in enumerate(zip(self.blocks, self._paths, strict=True)):
            updates = {path: _update(f"block {index}: {path}", block.get_submodule(path)) for path in paths}
            if part := {path: lora for path, lora in updates.items() if lora is not None}:
                found[index] = part
        return found

    def adapter(self, parts: Mapping[int, Part]) -> Adapter | None:
        """The adapter that has these parts; the same one while they do not change. Without any, that of the connection.

        Raises ConfigError if there are both.
        """
        packed = {index: self._pack(index, part) for index, part in parts.items()}
        is_new = self._adapter is None or packed != self._packed
        self._packed = packed
        if not packed:
            self._adapter = self._own
        elif self._own is not None:
            raise ConfigError("blocks compute one adapter: connect without `adapter`, or disable that of PEFT")
        elif is_new:
            self._adapter = make_adapter(self._model_digest, {index: each.content for index, each in packed.items()})
        return self._adapter

    def _pack(self, index: int, part: Part) -> _Packed:
        state = tuple((name, lora.scale, version_of(lora.a), version_of(lora.b)) for name, lora in part.items())
        before = self._packed.get(index)
        if before is not None and before.state == state:
            return before
        own = {
            name: Lora(lora.a.detach().float().cpu(), lora.b.detach().float().cpu(), lora.scale)
            for name, lora in part.items()
        }
        for name, lora in own.items():
            if not bool(lora.a.isfinite().all() and lora.b.isfinite().all()):
                raise ConfigError(f"block {index}: {name}: the adapter has numbers that are not finite")
        return _Packed(state, part, (pack_part(own), values_of(own)))


def trained_matrices(parts: Mapping[int, Part], span: Span) -> list[torch.Tensor]:
    """The matrices of the blocks of `span`, in the order in which servers give their gradients."""
    return [each for block in sorted(parts) if span.start <= block < span.end for each in matrices(parts[block])]


def _update(where: str, layer: Any) -> Lora | None:  # Any: PEFT's, if it is not ours
    """The update that PEFT has for a layer, or None. Raises ConfigError for any other than plain LoRA."""
    if is_absent(layer):
        _check_frozen(where, layer)
        return None
    if (type(layer).__module__, type(layer).__name__) != _KIND:
        raise ConfigError(f"{where}: servers compute LoRA alone, and this is {type(layer).__name__}")
    if not is_absent(layer.get_base_layer()):
        raise ConfigError(f"{where}: the weights are with the servers: use an initialization that does not change them")
    _check_frozen(where, layer.get_base_layer())
    if layer._forward_pre_hooks or layer._forward_hooks:
        raise ConfigError(
            f"{where}: a hook on it would not run, since the layer is with the servers. With PEFT, choose one adapter "
            "for all rows, and no `adapter_names`"
        )
    if layer.merged:
        raise ConfigError(f"{where}: an adapter cannot be merged into weights that are with the servers")
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or not active:
        return None
    if len(active) > 1:
        raise ConfigError(f"{where}: {len(active)} adapters are active at once, and servers compute one")
    (name,) = active
    if layer.lora_variant.get(name) is not None or layer.lora_bias.get(name):
        raise ConfigError(f"{where}: servers compute plain LoRA, without DoRA, other variants or a bias")
    if layer.training and getattr(layer.lora_dropout[name], "p", 0.0):
        raise ConfigError(f"{where}: servers drop nothing out: set lora_dropout=0")
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    if len(a) > MOST_RANK:
        raise ConfigError(f"{where}: a rank of {len(a)}, and servers take {MOST_RANK} at most")
    return Lora(a, b, float(layer.scaling[name]))


def _check_frozen(where: str, layer: torch.nn.Module) -> None:
    """Raises ConfigError if gradients are wanted for weights that are not here. PEFT wants those of biases if asked."""
    if torch.is_grad_enabled():
        for name, each in layer.named_parameters(recurse=False):
            if each.requires_grad:
                raise ConfigError(
                    f"{where}.{name} is with the servers, which keep it frozen: set its requires_grad to False (and "
                    "the bias of a PEFT config to 'none'), and train adapters, prompts, or what is here"
                )
