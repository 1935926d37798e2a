"""Blocks of the Rust extension whose weights are ones, and slabs for a sequence."""

from typing import Any, TypeAlias

import numpy as np

from llmnode import _native

Buffer: TypeAlias = Any  # whatever has, or lacks, the buffer protocol: before Python 3.12 that has no type


def llama_block(**changes: Any) -> dict[str, Any]:
    """One for `llama`, of ones."""
    ones = {
        "attended_norm": 16,
        "qkv": (48, 16),
        "output": (16, 16),
        "fed_norm": 16,
        "gate_up": (32, 16),
        "down": (16, 16),
    }
    none = dict.fromkeys(["qkv_bias", "head_norms", "output_bias", "gate_up_bias", "down_bias", "window"])
    weights = {name: np.ones(shape, np.float32) for name, shape in ones.items()}
    return {**weights, **none, "scaling": 0.25, "is_rotated": True, **changes}


def llama(*blocks: Any, **changes: Any) -> _native.LlamaBlocks:
    shape = {"hidden": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "inner": 16, "epsilon": 1e-5, "threads": 1}
    return _native.LlamaBlocks(blocks, **{**shape, "frequencies": [0.5] * 8, "rotary_scaling": 1.0, **changes})


def slabs(blocks: int = 1, capacity: int = 4) -> _native.SequenceSlabs:
    pairs = [(np.zeros((1, capacity, 16), np.float32), np.zeros((1, capacity, 16), np.float32)) for _ in range(blocks)]
    return _native.SequenceSlabs(pairs, capacity)
