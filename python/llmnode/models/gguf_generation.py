"""How a model of a GGUF file generates: where it ends, and how its makers would have its tokens chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llmnode.models.gguf_file import GgufFile
    from llmnode.models.gguf_tokenizer import GgufTokenizer

_KEY = "general.sampling."
_OPTIONS = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
"""Of transformers, by the file's names. Those of llama.cpp's other samplers have no counterpart."""


def generation_config_of(
    file: GgufFile, config: PreTrainedConfig, tokenizer: GgufTokenizer, notes: list[str]
) -> GenerationConfig:
    """transformers would have it end at eos alone. Most chat models end their turns with another token."""
    made = GenerationConfig.from_model_config(config)
    made._from_model_config = False
    if ends := tokenizer.end_ids:
        made.eos_token_id = ends[0] if len(ends) == 1 else ends
    if never := tokenizer.suppressed():
        made.suppress_tokens = never
    metadata = file.metadata
    for name, option in _OPTIONS.items():
        if f"{_KEY}{name}" in metadata:
            setattr(made, option, metadata.number(f"{_KEY}{name}", 1))
    if f"{_KEY}top_k" in metadata:
        made.top_k = metadata.whole(f"{_KEY}top_k", 0)
    if f"{_KEY}temp" in metadata:
        made.do_sample = made.temperature > 0
        if not made.do_sample:
            made.temperature = 1.0
    notes.extend(f"{_KEY}{name} is not supported and left out" for name in metadata.unread(_KEY))
    return made
