"""Llamas with random weights, in sizes for which others have published speeds."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from llmnode.models.embedded import open_embedded
from llmnode.models.open_model import open_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmnode.models.sources.folder import ModelFolder

SIZES = {"llama-34m": (8, 512), "llama-222m": (16, 1024), "llama-1b": (16, 2048), "llama-8b": (32, 4096)}
"""The number of blocks and the hidden size."""
IN_BF16 = "-bf16"
"""Ends the name of a model whose weights have 16 bits."""
VOCABULARY = 8192
HEAD_SIZE = 64
CONTEXT_TOKENS = 2048


@contextmanager
def opened(name: str | None) -> Iterator[ModelFolder]:
    """The model `name`: one of `SIZES`, which is made now and removed with the context, or a model for `open_model`."""
    size = SIZES.get((name or "").removesuffix(IN_BF16))
    if name is None or size is None:
        yield open_model(name)
        return
    with TemporaryDirectory(prefix="llmnode-") as folder:
        path = Path(folder) / name
        _make(path, *size, in_bf16=name.endswith(IN_BF16))
        yield open_model(str(path))


def _make(path: Path, blocks: int, hidden_size: int, *, in_bf16: bool) -> None:
    """It has the embedded model's tokenizer, and knows the first of its tokens, so its output is text."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=blocks,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_attention_heads=hidden_size // HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT_TOKENS,
        pad_token_id=0,  # for classifiers
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes minutes for billions of numbers
        model = LlamaForCausalLM(config)
    (model.bfloat16() if in_bf16 else model).save_pretrained(path)
    AutoTokenizer.from_pretrained(open_embedded().path, local_files_only=True).save_pretrained(path)
