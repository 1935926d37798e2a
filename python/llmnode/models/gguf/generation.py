"""How a model of a GGUF file generates: where it ends, and how its makers would have its tokens chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llmnode.models.gguf.file import GgufFile
    from llmnode.models.gguf.tokenizer import GgufTokenizer

_KEY = "general.sampling."
_OPTIONS = {
    "temp": ("temperature", 0, 1000),
    "top_p": ("top_p", 1e-6, 1),
    "min_p": ("min_p", 0, 1),
    "penalty_repeat": ("repetition_penalty", 1e-3, 1000),
}
"""By name in the file: the name in transformers, and its range. llama.cpp's other samplers have no counterpart."""


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
    options: dict[str, float] = {}
    for name, (option, least, most) in _OPTIONS.items():
        if (key := f"{_KEY}{name}") in metadata:
            options[option] = metadata.number(key, 1)
            if not least <= options[option] <= most:
                raise metadata.refusal(key, f"a number from {least:g} to {most:g}")
    if f"{_KEY}top_k" in metadata:
        options["top_k"] = metadata.whole(f"{_KEY}top_k", 0)
    if options.get("temperature", 1) <= 0:  # greedy: transformers refuses options of samplers beside it
        options = {name: value for name, value in options.items() if name == "repetition_penalty"}
    made.update(**options, do_sample=bool(options.keys() - {"repetition_penalty"}) or None)
    notes.extend(f"{_KEY}{name} is not supported and left out" for name in metadata.unread(_KEY))
    return made
