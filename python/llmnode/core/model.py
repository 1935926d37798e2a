"""What a model is to the swarm: enough to tell two models apart and to size messages, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, starmap

FP32_BYTES = 4
DTYPES = ("float32", "bfloat16", "float16")
"""What blocks are computed in. Only float32 is exact (design section 7)."""
QUANTS = ("none", "int8", "nf4")
"""What the weights of their linear layers are rounded to, in memory alone."""

SAME = "same"
KV_DTYPES = (SAME, "int8")
"""What keys and values are kept in: in what the blocks are computed in, or rounded to 8 bits."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Of `DTYPES`, `QUANTS` and `KV_DTYPES` one each."""

    dtype: str = "float32"
    quant: str = "none"
    kv_dtype: str = SAME

    @property
    def name(self) -> str:
        """All in one word, which is what peers call the dtype: another is another profile, to older peers too."""
        quant = "" if self.quant == "none" else f"+{self.quant}"
        kv_dtype = "" if self.kv_dtype == SAME else f"+kv-{self.kv_dtype}"
        return f"{self.dtype}{quant}{kv_dtype}"


PRECISIONS = {each.name: each for each in starmap(Precision, product(DTYPES, QUANTS, KV_DTYPES))}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Two peers serve the same model if their `digest`s are equal; the rest is for people and for limits.

    `digest` is 32 bytes over name, revision, config and tensor index (`llmnode.models.sources.folder`).
    `dtype`, one of `PRECISIONS`, is what the blocks are computed in, and what their weights and KV are rounded to;
    hidden states between them are fp32 whatever it is. `context_tokens` is the longest sequence that the model was made
    for, and `context_reason` says what is beyond it, if anything.
    """

    name: str
    digest: bytes
    blocks: int
    hidden_size: int
    context_tokens: int
    dtype: str
    context_reason: str = ""

    @property
    def context_text(self) -> str:
        """For messages."""
        return f"{self.context_tokens}" + (f" ({self.context_reason})" if self.context_reason else "")

    @property
    def row_bytes(self) -> int:
        """Size of one position's hidden state between blocks."""
        return FP32_BYTES * self.hidden_size
