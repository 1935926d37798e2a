"""A model as wide as BLOOM-176B, with next to no weights: it stands for BLOOM where blocks only take time."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from llmnode.models.open_model import open_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmnode.models.sources.folder import ModelFolder

HIDDEN_SIZE = 14336
CONTEXT_TOKENS = 4096
VOCABULARY = 16


@contextmanager
def opened_wide(blocks: int) -> Iterator[ModelFolder]:
    """A Llama whose blocks have one head of two values, and two values within. It goes with the context."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=blocks,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT_TOKENS,
    )
    torch.manual_seed(0)
    with TemporaryDirectory(prefix="llmnode-") as folder:
        path = Path(folder) / "as-wide-as-bloom"
        LlamaForCausalLM(config).save_pretrained(path)
        yield open_model(str(path))
