"""Makes a transformers config from the metadata of a GGUF file.

transformers reads a part of it. The rest is read here, as llama.cpp, whose format it is, reads it: sizes that
transformers takes from one checkpoint, windows, softcaps, and the scaling of rotary embeddings. A key that would change
numbers and has no place in the config is refused by its name; a key that nobody knows is named.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from llmnode.errors import ModelError
from llmnode.models.gguf.rope import llama3_scaling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llmnode.models.gguf.file import GgufFile

MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "starcoder2": "starcoder2",
}
"""By architecture: those that transformers reads from GGUF, and that we run. In bloom and falcon, queries, keys and
values are fused in an order that is not shown to be right."""

ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "activation_sparsity_scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
"""Keys that change numbers, and values with which they do not: of architectures that do not read them."""


def config_of(file: GgufFile, notes: list[str]) -> PreTrainedConfig:
    """The model's config. Metadata without a place in it goes into `notes`, a line each.

    Raises ModelError for an architecture, or an option of one, that is not supported.
    """
    from transformers import CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    architecture = file.metadata.text("general.architecture", "")
    if architecture not in MODEL_TYPES:
        raise ModelError(_unsupported(file, architecture))
    described = _Described(file, architecture)
    described.check_sizes()
    # Not earlier: transformers accepts values of any kind and size.
    described.options = load_gguf_checkpoint(str(file.path))["config"]
    described.read_sizes()
    described.read_family()
    described.read_rope()
    described.read_rest(notes)
    config_class: Any = CONFIG_MAPPING[MODEL_TYPES[architecture]]
    try:
        config: PreTrainedConfig = config_class.from_dict(described.options)
    except Exception as error:  # huggingface_hub's checks of a config's fields raise kinds of their own
        raise ModelError(
            f"{file.path} has metadata that transformers refuses ({' '.join(str(error).split())}): "
            "get the file again, or use the model in safetensors"
        ) from error
    return config


def _unsupported(file: GgufFile, architecture: str) -> str:
    return (
        f"{file.path}: the GGUF architecture {architecture[:40]} is not supported yet; supported are: "
        f"{', '.join(sorted(MODEL_TYPES))}: use the model in safetensors"
    )


class _Described:
    """The options of a config, while they are read from a file, concern by concern."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.metadata = file.metadata
        self.tensors = file.tensors
        self.architecture = architecture
        self.options: dict[str, Any] = {}  # Any: as transformers' configs have them

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.key(name) in self.metadata

    def whole(self, name: str, default: int = 0) -> int:
        return self.metadata.whole(self.key(name), default)

    def number(self, name: str, default: float = 0) -> float:
        return self.metadata.number(self.key(name), default)

    def required(self, name: str) -> int:
        if not self.has(name):
            raise ModelError(f"{self.file.path} has no {self.key(name)}: get the file again")
        if (value := self.whole(name)) < 1:
            raise self.metadata.refusal(self.key(name), "a number above 0")
        return value

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.file.path} has {what}, which is not supported: use the model in safetensors")

    def check_sizes(self) -> None:
        """That they can be true of these tensors: a model of any size would be made of them otherwise."""
        self.blocks = self.required("block_count")
        self.hidden_size = self.required("embedding_length")
        self.heads = self.required("attention.head_count")
        self.context_tokens = self.required("context_length")
        optional = self.architecture in ("gpt2", "qwen2moe", "qwen3moe")
        self.feed_forward = self.whole("feed_forward_length") if optional else self.required("feed_forward_length")
        self.kv_heads = self.whole("attention.head_count_kv", self.heads)
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{self.file.path} has no usable token_embd.weight: use the model in safetensors")
        width, self.vocabulary = map(int, embedding.shape)
        if width != self.hidden_size:
            raise self.metadata.refusal(self.key("embedding_length"), f"the width of its embedding, {width},")
        found = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        if self.blocks != len(found):
            raise self.metadata.refusal(self.key("block_count"), f"the number of its blocks, {len(found)},")
        if self.kv_heads < 1 or self.heads % self.kv_heads or self.heads > self.hidden_size * 16:
            raise self.metadata.refusal(self.key("attention.head_count"), "a number of heads that fits the others")
        of_rms = self.architecture not in ("gpt2", "starcoder2")
        epsilon = "attention.layer_norm_rms_epsilon" if of_rms else "attention.layer_norm_epsilon"
        if not self.has(epsilon):
            raise ModelError(f"{self.file.path} has no {self.key(epsilon)}: get the file again")
        if not 0 <= self.number(epsilon) < 1:
            raise self.metadata.refusal(self.key(epsilon), "a number from 0 to 1")
        if not self.number("rope.freq_base", 10_000) > 0:
            raise self.metadata.refusal(self.key("rope.freq_base"), "a number above 0")

    def read_sizes(self) -> None:
        """Read the sizes from the file: transformers takes several of them from one checkpoint."""
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        options = self.options
        options["model_type"] = MODEL_TYPES[self.architecture]  # transformers has `mistral` by the model's name
        theirs: Any = GGUF_CONFIG_MAPPING  # Any: not typed
        for name, option in theirs[options["model_type"].removesuffix("_text")].items():
            if option is not None and self.has(name):
                options[option] = self.metadata.same(self.key(name))
        for name in ("bos_token_id", "eos_token_id", "padding_token_id"):
            if f"tokenizer.ggml.{name}" not in self.metadata:  # a config's default is another model's
                options[name.replace("padding", "pad")] = None
        options["vocab_size"] = self.vocabulary
        options["num_key_value_heads"] = self.kv_heads
        self.metadata.mark([self.key("vocab_size")])
        queries = self.tensors.get("blk.0.attn_q.weight")
        width = self.hidden_size if queries is None else int(queries.shape[-1])
        head_dim = self.whole("attention.key_length", width // self.heads)
        if self.whole("attention.value_length", head_dim) != head_dim:
            raise self.refuse(f"values of other lengths ({self.key('attention.value_length')}) than keys")
        if head_dim < 1 or (head_dim % 2 and self.architecture != "gpt2"):
            raise self.metadata.refusal(self.key("attention.key_length"), "an even number")
        self.head_dim = head_dim
        if self.architecture == "gpt2":
            options.pop("num_key_value_heads")
            options["n_positions"] = self.context_tokens
            options["n_inner"] = self.feed_forward or None
            if head_dim * self.heads != self.hidden_size or self.kv_heads != self.heads:
                raise self.refuse(f"heads of {head_dim}")
            return
        if self.architecture in _OWN_HEAD_DIM or head_dim * self.heads != self.hidden_size:
            options["head_dim"] = head_dim

    def read_family(self) -> None:
        options, architecture = self.options, self.architecture
        names = set(self.tensors)
        if architecture in ("llama", "qwen3", "qwen3moe") and "blk.0.attn_q.bias" in names:
            options["attention_bias"] = True
        if architecture == "llama" and "blk.0.ffn_gate.bias" in names:
            options["mlp_bias"] = True
        if architecture in ("phi3", "starcoder2", "gemma2", "gemma3"):
            # llama.cpp's converter does not write the windows of Mistral and Qwen, and its forward has none.
            if (window := self.whole("attention.sliding_window")) or architecture in ("phi3", "starcoder2"):
                options["sliding_window"] = window or None
        elif self.whole("attention.sliding_window") not in range(1, self.context_tokens):
            self.metadata.mark([self.key("attention.sliding_window")])
        else:
            raise self.refuse(f"attention in windows ({self.key('attention.sliding_window')})")
        if architecture in ("qwen2moe", "qwen3moe"):
            self._read_experts()
        if architecture in ("gemma2", "gemma3"):
            self._read_gemma()

    def _read_experts(self) -> None:
        options = self.options
        options["num_experts"] = self.required("expert_count")
        options["num_experts_per_tok"] = self.required("expert_used_count")
        if options["num_experts_per_tok"] > options["num_experts"]:
            raise self.metadata.refusal(self.key("expert_used_count"), f"at most {options['num_experts']}")
        experts = self.tensors.get("blk.0.ffn_gate_exps.weight")  # (hidden, inner, experts)
        if experts is None or len(experts.shape) != 3 or int(experts.shape[2]) != options["num_experts"]:
            raise ModelError(f"{self.file.path} has no usable blk.0.ffn_gate_exps.weight: use the model in safetensors")
        options["moe_intermediate_size"] = self.whole("expert_feed_forward_length", int(experts.shape[1]))
        if self.architecture == "qwen2moe":
            shared = self.tensors.get("blk.0.ffn_gate_shexp.weight")
            default = int(shared.shape[1]) if shared is not None else options["moe_intermediate_size"]
            options["shared_expert_intermediate_size"] = self.whole("expert_shared_feed_forward_length", default)
        if self.has("expert_weights_norm"):
            options["norm_topk_prob"] = self.metadata.flag(self.key("expert_weights_norm"), False)

    def _read_gemma(self) -> None:
        """No key has the scale of attention. llama.cpp takes it from the size of heads, but for one model of each."""
        options = self.options
        largest = {"gemma2": 46, "gemma3": 62}[self.architecture] == self.blocks
        options["query_pre_attn_scalar"] = self.hidden_size // self.heads if largest else self.head_dim
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self.has(name):
                options[name] = self.number(name) or None
        if self.architecture == "gemma3":
            self._read_pattern()

    def _read_pattern(self) -> None:
        key = self.key("attention.sliding_window_pattern")
        if key not in self.metadata:
            return
        value = self.metadata.raw(key)
        if isinstance(value, list) and len(value) == self.blocks:
            self.options["layer_types"] = ["sliding_attention" if each else "full_attention" for each in value]
        else:
            self.options["sliding_window_pattern"] = max(self.metadata.whole(key, 0), 1)

    def read_rope(self) -> None:
        """Base and scaling. Without a type, scaling is linear; without a factor, there is none."""
        if self.architecture == "gpt2":
            return
        self.options["rope_theta"] = self.number("rope.freq_base", 10_000.0)
        if self.architecture == "gemma3" and self.has("rope.freq_base_swa"):
            self.options["rope_local_base_freq"] = self.number("rope.freq_base_swa")
        self._read_rotated()
        if long := next((name for name in _LONG_FACTORS if name in self.tensors), None):
            raise self.refuse(
                f"rotary embeddings scaled by factors ({long}, longrope) that change with the length of a text"
            )
        factor = self.number("rope.scaling.factor") or self.number("rope.scale_linear")
        kind = self.metadata.text(self.key("rope.scaling.type"), "linear")
        if kind not in ("none", "linear", "yarn"):
            raise self.refuse(f"rotary embeddings scaled by {kind[:40]!r} ({self.key('rope.scaling.type')})")
        if factor < 0:
            raise self.metadata.refusal(self.key("rope.scaling.factor"), "a number above 0")
        original = self.whole("rope.scaling.original_context_length") or self.context_tokens
        scaling: dict[str, Any] | None = None  # Any: as transformers has it
        if kind == "yarn":
            scaling = self._yarn(factor, original)
        elif kind == "linear" and factor not in (0, 1):
            scaling = {"rope_type": "linear", "factor": factor}
        if self.number("rope.scaling.attn_factor", 1) != 1 and kind != "yarn":
            raise self.refuse(f"attention scaled by {self.key('rope.scaling.attn_factor')}")
        if (factors := self.tensors.get(ROPE_FACTORS)) is not None:
            scaling = self._llama3(factors, scaling)
        if scaling is not None:
            self.options["rope_scaling"] = scaling

    def _read_rotated(self) -> None:
        rotated = self.whole("rope.dimension_count", self.head_dim)
        if rotated == self.head_dim:
            if self.architecture == "phi3":
                self.options["partial_rotary_factor"] = 1.0
            return
        if self.architecture != "phi3" or not 0 < rotated < self.head_dim:
            raise self.refuse(
                f"rotary embeddings for {rotated} of {self.head_dim} ({self.key('rope.dimension_count')})"
            )
        self.options["partial_rotary_factor"] = rotated / self.head_dim

    def _yarn(self, factor: float, original: int) -> dict[str, Any]:  # Any: as transformers has it
        if factor < 1:
            raise self.refuse(f"rotary embeddings scaled by yarn without a factor ({self.key('rope.scaling.factor')})")
        if self.architecture == "phi3":
            raise self.refuse("rotary embeddings scaled by yarn")
        scaling: dict[str, Any] = {  # Any: likewise
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if self.has(f"rope.scaling.{ours}"):
                scaling[theirs] = self.number(f"rope.scaling.{ours}")
        attention = self.number("rope.scaling.attn_factor", 1) * self.number("rope.scaling.yarn_attn_factor", 1)
        if attention != 1:
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        return scaling

    def _llama3(self, tensor: Any, scaling: dict[str, Any] | None) -> dict[str, Any] | None:  # Any: as above
        """Llama 3 scales each frequency by its own factor. The file has the factors, a config what they follow from."""
        import gguf

        factors = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float64).reshape(-1)
        if len(factors) == self.head_dim // 2 and np.all(factors == 1):
            return scaling
        found = llama3_scaling(factors, self.head_dim, self.options["rope_theta"])
        if found is None or scaling is not None or self.architecture == "gemma3":
            raise self.refuse(f"rotary embeddings scaled by factors ({ROPE_FACTORS}) that are not those of Llama 3")
        return found

    def read_rest(self, notes: list[str]) -> None:
        from gguf import Keys

        if (scale := self.number("attention.scale")) and not math.isclose(scale, self.head_dim**-0.5, rel_tol=1e-6):
            raise self.refuse(f"{self.key('attention.scale')} = {scale:g}")
        if self.whole("pooling_type"):
            notes.append(f"{self.key('pooling_type')} is set: this model is made for embeddings, not for text")
        if (version := self.metadata.whole("general.quantization_version", 2)) != 2 and self._is_quantized:
            raise self.refuse(f"tensors of the quantization version {version}")
        listed = {name for group in vars(Keys).values() if isinstance(group, type) for name in vars(group).values()}
        for name, value in self.metadata.unread(f"{self.architecture}.").items():
            if name in _NEUTRAL and value in _NEUTRAL[name]:
                continue
            if name in _NEUTRAL or f"{{arch}}.{name}" in listed:
                raise self.refuse(f"{self.key(name)} = {str(value)[:40]}")
            notes.append(f"{self.key(name)} is not understood and left out")

    @property
    def _is_quantized(self) -> bool:
        return any(tensor.tensor_type.name not in ("F32", "F16", "BF16") for tensor in self.tensors.values())


_OWN_HEAD_DIM = ("llama", "qwen3", "qwen3moe", "gemma2", "gemma3")
"""Their configs name it, and have a default that does not follow from the other sizes."""
