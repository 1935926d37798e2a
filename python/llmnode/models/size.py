"""How much memory a model takes, from its config alone, and whether that is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmnode.core.model import SAME
from llmnode.core.policy import BudgetPolicy
from llmnode.errors import ConfigError
from llmnode.machine.memory import free_bytes
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.families import family_of, kv_heads
from llmnode.models.layers import join_products, make_block
from llmnode.models.load import found_block_bytes, tensor_bytes
from llmnode.models.meta_model import without_weights
from llmnode.models.native import takes_narrow
from llmnode.models.weights.quantized import quantized_bytes
from llmnode.models.weights.read_block import block_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.span import Span
    from llmnode.models.sources.folder import ModelFolder

_MOST_POSITIONS = 2**32 - 1
"""The largest number that fits in an announcement."""
_SCALE_BYTES = 4
"""The bytes of a scale of KV in 8 bits, for each position and head."""
MEMORY_SHARE = 0.8
"""A server takes this share of the free memory: other programs grow too."""
GRAPH_BYTES = BudgetPolicy().graph_bytes
"""A server keeps this much of its device's memory free for gradients."""
PEERS_BYTES = BudgetPolicy().memory_bytes + GRAPH_BYTES + BudgetPolicy().beside_bytes + BudgetPolicy().tables_bytes
"""A node keeps this much of the machine's memory free for everything that peers make it hold."""
WEIGHTS, KV, LOG = "weights", "kv", "log"
"""The parts of a server's memory. LOG has the logged outputs of its blocks."""


@dataclass(frozen=True, slots=True)
class Place:
    """The memory of one device, by torch's name: how much is free, and which parts of a server are there."""

    free_bytes: int
    device: str = "cpu"
    holds: frozenset[str] = frozenset((WEIGHTS, KV, LOG))


def find_places(device: str, kv_device: str | None = None) -> list[Place]:
    """The devices with the memory that is free for a model now. KV is beside the weights, unless it has a device of its
    own. The log is in this machine's memory, and so is everything that peers make the node keep (`BudgetPolicy`).
    """
    homes = {WEIGHTS: device, KV: kv_device or device, LOG: "cpu"}
    held = {each: frozenset(what for what, home in homes.items() if home == each) for each in homes.values()}
    kept_bytes = {device: GRAPH_BYTES} | {"cpu": PEERS_BYTES}
    return [Place(max(0, free_bytes(each) - kept_bytes.get(each, 0)), each, holds) for each, holds in held.items()]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes in one precision. `kv_token_bytes` are those of one position in one block.

    `log_token_bytes` are those of a server's output for one position, in float32. It is logged while its KV is there.
    """

    each_block_bytes: Sequence[int]
    ends_bytes: int
    kv_token_bytes: int
    log_token_bytes: int = 0

    @property
    def blocks(self) -> int:
        return len(self.each_block_bytes)

    @property
    def block_bytes(self) -> int:
        """The size of the largest block."""
        return max(self.each_block_bytes)

    def fitting_blocks(self, places: Sequence[Place], kv_tokens: Callable[[int], int]) -> int:
        """How many blocks fit into a server's share of the free memory, with all its KV in use.

        `kv_tokens` gives the KV positions for a number of blocks.
        """
        for blocks in range(self.blocks, 0, -1):
            taken = self._taken(blocks * self.block_bytes, blocks, kv_tokens(blocks))
            if all(_in(place, taken) <= int(MEMORY_SHARE * place.free_bytes) for place in places):
                return blocks
        return 0

    def kv_tokens(self, kv_bytes: int, blocks: int) -> int:
        """The number of positions of `blocks` blocks, with their log, for which `kv_bytes` are enough."""
        return min(kv_bytes // (blocks * self.kv_token_bytes + self.log_token_bytes), _MOST_POSITIONS)

    def fits(self, places: Sequence[Place], span: Span, kv_tokens: int) -> bool:
        """Whether there is so much as a server of `span` takes, with all its KV in use."""
        return self._short_place(places, span, kv_tokens) is None

    def fits_beside(self, free_bytes: int, span: Span, held: Span, kv_tokens: int) -> bool:
        """Whether a server of `held` has memory for `span` too, with blocks of both once, and KV of both all in use.

        `free_bytes` are those of the CPU beside the weights of `held`. Both together take no more than a server's share
        of that and of these weights: what `fitting_blocks` would give a server alone. No KV is taken to be in use yet.
        """
        held_bytes = sum(self.each_block_bytes[held.start : held.end])
        fresh_bytes = sum(
            self.each_block_bytes[block] for block in range(span.start, span.end) if not held.start <= block < held.end
        )
        kv_bytes = sum(sum(self._taken(0, len(each), kv_tokens).values()) for each in (span, held))
        return held_bytes + fresh_bytes + kv_bytes <= int(MEMORY_SHARE * (free_bytes + held_bytes))

    def check_memory(self, places: Sequence[Place], span: Span, kv_tokens: int, name: str) -> None:
        """Raises ConfigError, with the numbers, unless it `fits`. `name` is the model's."""
        if (short := self._short_place(places, span, kv_tokens)) is None:
            return
        taken = self._taken_by(span, kv_tokens)
        words = {WEIGHTS: "their weights take {}", KV: f"KV for {kv_tokens} positions {{}}", LOG: "the log of those {}"}
        needs = [words[what].format(_mib(taken[what])) for what in words if what in short.holds and taken[what]]
        fixes = ["serve fewer --blocks"] if len(span) > 1 else []
        if kv_tokens and _in(short, {**taken, KV: 0, LOG: 0}) <= short.free_bytes:
            fixes.append("lower --kv-tokens or --kv-memory")
        fixes.append(
            "end other programs" if short.device != "cpu" else "raise the container's limit or end other programs"
        )
        on = "" if short.device == "cpu" else f" on {short.device}"
        kept = f" ({_mib(PEERS_BYTES)} MiB are kept for peers)" if short.device == "cpu" else ""
        raise ConfigError(
            f"blocks {span} of {name} do not fit: {short.free_bytes >> 20} MiB are free{on}; {', '.join(needs)}: "
            f"{', '.join(fixes)}{kept}"
        )

    def _short_place(self, places: Sequence[Place], span: Span, kv_tokens: int) -> Place | None:
        taken = self._taken_by(span, kv_tokens)
        return next((place for place in places if _in(place, taken) > place.free_bytes), None)

    def _taken_by(self, span: Span, kv_tokens: int) -> dict[str, int]:
        return self._taken(sum(self.each_block_bytes[span.start : span.end]), len(span), kv_tokens)

    def _taken(self, weight_bytes: int, blocks: int, kv_tokens: int) -> dict[str, int]:
        kv_bytes, log_bytes = blocks * kv_tokens * self.kv_token_bytes, kv_tokens * self.log_token_bytes
        return {WEIGHTS: weight_bytes, KV: kv_bytes, LOG: log_bytes}


def measure_size(
    folder: ModelFolder,
    dtype: torch.dtype = torch.float32,
    quant: str = "none",
    kv_dtype: str = SAME,
    device: str = "cpu",
    *,
    look: bool = True,
) -> ModelSize:
    """The sizes of a model. It reads no tensor; with a `look` it reads some weights that may need fewer bits.

    Without a `look` such blocks may take less than this, and so may the ends. Raises ModelError for a family that is
    not supported, or not with quantized weights.
    """
    found_bytes: int | None = None
    if (blueprint := blueprint_of(folder)) is not None:
        is_narrow = takes_narrow(blueprint, dtype, device, quant)
        found_bytes = found_block_bytes(folder) if is_narrow and look else None
        blocks = []
        for index, plan in enumerate(blueprint.blocks):
            dtypes = block_dtypes(folder, index, plan, dtype, halves=is_narrow)
            blocks.append(make_block(plan, index, blueprint.activation, dtypes))
            join_products(blocks[-1])
        ends_bytes, head_dim = blueprint.ends * dtype.itemsize, blueprint.blocks[0].head_dim
        heads = blueprint.blocks[0].shapes["self_attn.k_proj.weight"][0] // head_dim
    else:
        family, config = family_of(folder.config), folder.config
        model = without_weights(folder, family, "eager", dtype)
        blocks = getattr(model.get_submodule(family.decoder), family.blocks)
        ends_bytes = sum(
            parameter.nbytes for name, parameter in model.named_parameters() if not name.startswith(family.block_prefix)
        )
        head_dim, heads = _head_dim(config), kv_heads(config)
    block_bytes = [tensor_bytes(block) if quant == "none" else quantized_bytes(block, quant) for block in blocks]
    if found_bytes is not None:
        block_bytes = [found_bytes] * len(block_bytes)
    head_bytes = {SAME: head_dim * dtype.itemsize, "int8": head_dim + _SCALE_BYTES}[kv_dtype]
    return ModelSize(block_bytes, ends_bytes, 2 * heads * head_bytes, 4 * folder.info.hidden_size)


def _in(place: Place, taken: Mapping[str, int]) -> int:
    return sum(taken[what] for what in place.holds)


def _mib(size_bytes: int) -> int:
    """Rounded up, so that a message never shows more than the free memory as if it fit."""
    return -(-size_bytes >> 20)


def _head_dim(config: Any) -> int:  # Any: each family's config has attributes of its own
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
