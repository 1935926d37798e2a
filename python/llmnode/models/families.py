"""The families of models that we cut, and where a causal LM of each keeps its parts.

A family is listed once `tests/reference/` shows it exact. If a listed family allows a configuration that we cannot run
exactly, it is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError
from llmnode.models.ropes import KNOWN_ROPES, ropes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Family:
    """Names inside a causal LM of transformers. `decoder` is a path from the model, the others are in the decoder.

    Entry (`tokens`, `positions`, `enter`, `multiplier`) and exit (`leave`, and the head of the LM) belong to the ends.
    """

    decoder: str = "model"
    blocks: str = "layers"
    tokens: str = "embed_tokens"
    positions: str | None = None  # learned position embeddings, added to those of the tokens
    enter: tuple[str, ...] = ()  # other modules before the blocks
    multiplier: str | None = None  # a factor for embeddings, ours or the caller's
    leave: tuple[str, ...] = ("norm",)
    fused: bool = False  # blocks that `fused.py` has in fewer operations
    own_attention: bool = False  # code of its own, which `compute/own_attention.py` replaces
    context_tokens: int | None = None  # that it was made for, where its configs do not say

    @property
    def block_prefix(self) -> str:
        """The names of all tensors of blocks begin with this; the index of the block follows."""
        return f"{self.decoder}.{self.blocks}."


FAMILIES = {
    "bloom": Family(
        "transformer",
        blocks="h",
        tokens="word_embeddings",
        enter=("word_embeddings_layernorm",),
        leave=("ln_f",),
        own_attention=True,
        context_tokens=2048,
    ),
    "cohere": Family(),
    "falcon": Family("transformer", blocks="h", tokens="word_embeddings", leave=("ln_f",), own_attention=True),
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "gpt2": Family("transformer", blocks="h", tokens="wte", positions="wpe", leave=("ln_f",)),
    "gpt_neox": Family("gpt_neox", tokens="embed_in", leave=("final_layer_norm",)),
    "granite": Family(multiplier="embedding_multiplier"),
    "llama": Family(fused=True),
    "mistral": Family(fused=True),
    "mixtral": Family(),
    "olmo2": Family(),
    "olmoe": Family(),
    "opt": Family(
        "model.decoder",
        positions="embed_positions",
        enter=("project_in",),
        leave=("final_layer_norm", "project_out"),
    ),
    "phi": Family(leave=("final_layernorm",)),
    "phi3": Family(),
    "qwen2": Family(fused=True),
    "qwen2_moe": Family(),
    "qwen3": Family(fused=True),
    "qwen3_moe": Family(),
    "smollm3": Family(fused=True),
    "starcoder2": Family(),
}
"""The supported families by the `model_type` of the config."""


def family_of(config: PreTrainedConfig) -> Family:
    """Raises ModelError for a family that is not supported, or an option of it."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(f"models of the family {config.model_type!r} are not supported; supported are: {supported}")
    if option := next(_refused_options(config), None):
        raise ModelError(
            f"this model of the family {config.model_type!r} has {option}, which is not supported: get one without"
        )
    return family


def kv_heads(config: Any) -> int:  # Any: each family's config has attributes of its own
    """Heads of keys and values in a block."""
    if config.model_type == "falcon":
        shared = config.multi_query and not config.new_decoder_architecture
        return 1 if shared else int(config.num_kv_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _refused_options(config: Any) -> Iterator[str]:  # Any: each family's config has attributes of its own
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        yield f"weights quantized by {_method(quantized)} (quantization_config)"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "attention that is not causal"
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    are_full = types is None or (isinstance(types, list) and all(each == "full_attention" for each in types))
    if not are_full and not hasattr(type(config), "layer_types"):
        yield "layer_types, of which its attention knows nothing, and transformers' cache does"
    if window is not None and (types is None or not are_full) and (not isinstance(window, int) or window < 1):
        yield f"a sliding_window of {window!r} positions"
    if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:
        yield "slow_but_exact, products cut as they were in training"
    if getattr(config, "add_cross_attention", False):
        yield "cross attention"
    for rope in ropes_of(config):
        if (kind := rope.get("rope_type", "default")) not in KNOWN_ROPES:
            yield f"rotary embeddings of the type {kind!r}"


def _method(quantized: Any) -> str:  # Any: an object of transformers, or of JSON
    read = quantized.get if isinstance(quantized, dict) else partial(getattr, quantized)
    return str(read("quant_method", None) or "a method that it does not name")
