"""Small random models of every family, and a run of them through cuts, chunks and company."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from llmnode.client.versions import CACHE, cache_of
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.kv import KVForm
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SessionId
from llmnode.core.operations import Close, Fork, Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.families import FAMILIES
from llmnode.models.load import Ends, load_ends
from llmnode.models.sources.folder import ModelFolder, open_folder
from llmnode.models.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import AdapterId

BLOCKS = 5
HIDDEN_SIZE = 64
VOCABULARY = 211
WINDOW = 8
KV_TOKENS = 1000
SESSION_TOKENS = 64
ONE_BY_ONE = 12

_SMALL = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GATED = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 96}
_GPT2 = {name: value for name, value in _SMALL.items() if name != "intermediate_size"}
_UNBOUNDED = {name: value for name, value in _SMALL.items() if name != "max_position_embeddings"}
_PATTERN = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _rope(kind: str, **options: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 32, **options}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_GATED, "attention_bias": True},
    "llama-rope3": {
        **_GATED,
        "rope_parameters": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    },
    "llama-yarn": {**_GATED, "rope_parameters": _rope("yarn", factor=4.0)},
    "qwen3": {**_GATED, "head_dim": 32},
    "qwen3-window": {
        **_GATED,
        "head_dim": 24,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "qwen3_moe": {
        **_GATED,
        "head_dim": 24,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mistral": {**_GATED, "sliding_window": WINDOW},
    "mixtral": {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "gemma2": {
        **_GATED,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        **_GATED,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": WINDOW,
        "layer_types": _PATTERN,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt2": {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "opt": {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": HIDDEN_SIZE},
    "opt-projected": {**_SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "gpt_neox": {**_SMALL, "intermediate_size": 96},
    "gpt_neox-serial": {**_SMALL, "intermediate_size": 96, "use_parallel_residual": False, "attention_bias": False},
    "phi3": {**_GATED, "sliding_window": WINDOW},
    "qwen2": {**_GATED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": {
        **_GATED,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "olmo2": _GATED,
    "olmoe": {**_GATED, "num_experts": 6, "num_experts_per_tok": 2},
    "smollm3": {**_GATED, "no_rope_layer_interval": 2},
    "gemma": {**_GATED, "head_dim": 24},
    "granite": {
        **_GATED,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "starcoder2": {**_GATED, "sliding_window": WINDOW},
    "cohere": {**_GATED, "logit_scale": 0.3, "use_qk_norm": True},
    "phi": {**_GATED, "partial_rotary_factor": 0.5},
    "bloom": _UNBOUNDED,
    "bloom-post_norm": {**_UNBOUNDED, "num_attention_heads": 8, "apply_residual_connection_post_layernorm": True},
    "falcon": {**_SMALL, "multi_query": True},  # 7b
    "falcon-new": {**_SMALL, "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True},  # 40b
    "falcon-one_norm": {
        **_SMALL,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
    },  # 11b
    "falcon-alibi": {**_SMALL, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},  # rw-1b
    "falcon-alibi_parallel": {**_SMALL, "multi_query": True, "alibi": True},
}
"""By the family's name, and what is special about the variant after a dash."""

FUSED = [name for name, family in FAMILIES.items() if family.fused]
EXPERTS = [case for case, options in CONFIGS.items() if any("experts" in option for option in options)]
DENSE = [case for case in CONFIGS if case not in EXPERTS]
OF_EACH_KIND = ("llama", "gpt2", "mistral", "gemma2", "gemma3_text", "bloom", "falcon-new", "falcon-alibi")
"""Kinds of attention: heads that share KV or not, windows, softcapped scores, ALiBi, and families with code of their
own."""
CPU = torch.device("cpu")
OTHER_KV = (KVForm("int8"), KVForm(device=CPU), KVForm("int8", CPU))
"""In 8 bits, and as if the blocks were elsewhere."""


def family_of_case(case: str) -> str:
    return case.partition("-")[0]


def make_config(case: str, **options: Any) -> Any:  # Any: each family's config has attributes of its own
    from transformers import AutoConfig

    return AutoConfig.for_model(family_of_case(case), **{**CONFIGS[case], **options})


def embedding_scale(config: Any) -> float:  # Any: likewise
    """The factor by which the family multiplies its embeddings."""
    return HIDDEN_SIZE**0.5 if config.model_type.startswith("gemma") else getattr(config, "embedding_multiplier", 1.0)


def make_model(case: str, *, tied: bool, seed: int = 0, **options: Any) -> Any:  # Any: as transformers types its models
    """A causal LM whose weights are large enough that blocks, positions and the choice of token matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = make_config(case, tie_word_embeddings=tied, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    scale = embedding_scale(config)  # else a tied head would find the token that went in, whatever the blocks do
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.ndim == 1:  # norms and biases
            parameter += 0.2 * noise
        elif "emb" in name or "wte" in name or "wpe" in name:
            parameter.copy_(noise / scale)
        else:
            parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
    return model


def save_model(path: Path, case: str, *, tied: bool, **options: Any) -> None:  # Any: likewise
    """Save `make_model(case, tied=tied, **options)` in `path`. Many tests save the same model, which is made once."""
    path.mkdir(parents=True, exist_ok=True)
    files, generator = _saved(case, tied, json.dumps(options))
    for name, content in files.items():
        (path / name).write_bytes(content)
    torch.set_rng_state(generator)


@lru_cache(maxsize=128)  # of less than a megabyte each
def _saved(case: str, tied: bool, options: str) -> tuple[dict[str, bytes], torch.Tensor]:
    """The files by their names, and the state of torch's generator after the model was made."""
    model = make_model(case, tied=tied, **json.loads(options))
    generator = torch.get_rng_state()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}, generator


@dataclass
class Cut:
    """A model in a folder, cut at `edges`, and driven as clients would: any sequences' chunks in one forward."""

    ends: Ends
    executors: list[SpanExecutor]
    adapters: dict[SessionId, AdapterId] = field(default_factory=dict)
    """Those of sessions that have one."""
    _positions: dict[SessionId, int] = field(default_factory=dict)

    def forward(self, chunks: Mapping[SessionId, Sequence[int]]) -> dict[SessionId, torch.Tensor]:
        """Token ids that continue each session; what comes out of the last block, (tokens, hidden_size)."""
        pieces = []
        for session, tokens in chunks.items():
            if session not in self._positions:
                self._positions[session] = 0
                for executor in self.executors:
                    adapter = self.adapters.get(session)
                    assert executor.apply(Open(session, executor.span, SESSION_TOKENS, adapter=adapter))
            start = self._positions[session]
            pieces.append(Slice(session, start, len(tokens), to_bytes(self.ends.embed(list(tokens), start))))
            self._positions[session] += len(tokens)
        for executor in self.executors:
            outputs = executor.forward(pieces)
            pieces = [
                Slice(piece.session, piece.start, piece.length, output)
                for piece, output in zip(pieces, outputs, strict=True)
            ]
        return {piece.session: from_bytes(piece.hidden, HIDDEN_SIZE) for piece in pieces}

    def truncate(self, session: SessionId, length: int) -> None:
        for executor in self.executors:
            executor.apply(Truncate(session, length))
        self._positions[session] = length

    def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None:
        for executor in self.executors:
            executor.apply(Fork(session, source, shared, length))
        self._positions[session] = length

    def close(self) -> None:
        for session in self._positions:
            for executor in self.executors:
                executor.apply(Close(session))
        self._positions.clear()
        assert all(executor.kv_tokens_free() == KV_TOKENS for executor in self.executors)


def cut(
    folder: ModelFolder,
    edges: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    quant: str = "none",
    kv: KVForm | None = None,
) -> Cut:
    executors = [
        load_executor(folder, Span(start, end), KV_TOKENS, dtype, quant=quant, kv=kv) for start, end in pairwise(edges)
    ]
    return Cut(load_ends(folder, dtype), executors)


def kv_bytes(executor: SpanExecutor, name: SessionId) -> int:
    """That the session has reserved by now."""
    blocks = executor._sequences[name].kv._blocks.values()
    return sum(slab.states.nbytes for block in blocks for slab in block.slabs)


def session(name: int) -> SessionId:
    return SessionId(name.to_bytes(16, "big"))


def open_saved(path: Path) -> ModelFolder:
    return open_folder(path, "small")


@torch.inference_mode()
def deviation(model: Any, tokens: torch.Tensor) -> float:
    """The largest deviation of a score between one forward over all of (rows, tokens) and smaller batch shapes.

    They are chunks of five positions, and the last positions one by one, each of all rows and of every row alone.
    """
    whole, length = model(tokens).logits.float(), tokens.shape[1]
    groups = [slice(None), *(slice(row, row + 1) for row in range(len(tokens)))]
    shapes = range(0, length, 5), (0, *range(max(1, length - ONE_BY_ONE), length))
    largest = 0.0
    for rows, starts in product(groups if len(tokens) > 1 else groups[:1], shapes):
        cache = None
        for start, end in pairwise((*starts, length)):
            output = model(tokens[rows, start:end], use_cache=True, **{CACHE: cache})
            cache = cache_of(output)
            largest = max(largest, (output.logits.float() - whole[rows, start:end]).abs().max().item())
    return largest
