"""How fast a device computes blocks in a precision, while nothing has been measured: as a share of its float32.

The figures are estimates for the choice of `serve --dtype auto`. Those of CPUs are of `tests/bench/quality`, those of
GPUs of `tests/bench/device`, on the machines named there. Others are guesses, and are called so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.core.model import SAME
from llmnode.models.load import can_quantize, found_block_bytes
from llmnode.models.weights.quantized import fast_quant

if TYPE_CHECKING:
    from llmnode.core.model import Precision
    from llmnode.models.sources.folder import ModelFolder

_KV_INT8 = 0.92
"""KV in 8 bits, of KV as it is."""
_EMULATED = {"bfloat16": 0.4, "float16": 0.6}
"""A format that the CPU has no instructions for: numbers are converted there and back.

Decode of real blocks on a CPU with AVX2 had 0.45 and 0.7 of float32, and prompts 0.3 and 0.4 (28 November 2026).
"""
_GUESS = 0.05
"""Anything else that the device has no instructions for."""


def usual_pace(folder: ModelFolder, device: str, precision: Precision) -> float:
    """Blocks of the model on torch's `device`; 0 if they cannot be computed so. Raises ModelError as `load_span`."""
    if precision.quant != "none" and not can_quantize(folder):
        return 0.0
    on_gpu = torch.device(device).type == "cuda"
    quant = _on_gpu(precision.quant) if on_gpu else _on_cpu(precision.quant, folder)
    kv = 1.0 if precision.kv_dtype == SAME else _KV_INT8
    return _of_dtype(precision.dtype, device) * quant * kv


def is_emulated(device: str, precision: Precision) -> bool:
    """Whether the device has no instructions for it: the usual pace is a guess then, or is of one kind of device."""
    is_unpacked = precision.quant == "int8" and torch.device(device).type == "cpu" and fast_quant("cpu") != "int8"
    return is_unpacked or not _has(precision.dtype, device)


def usual_dtype(device: str) -> str:
    """The dtype of `--dtype auto` on a device that knows no swarm. bfloat16 needs an Ampere GPU or a later one."""
    is_gpu = torch.device(device).type == "cuda"
    return "bfloat16" if is_gpu and _of_dtype("bfloat16", device) > 1.0 else "float32"


def _of_dtype(dtype: str, device: str) -> float:
    if dtype == "float32":
        return 1.0
    if torch.device(device).type == "cuda":
        # 1.1 for 16 rows at once, 1.5 for a prompt; a guess for float16.
        return 1.3 if _has(dtype, device) else _GUESS
    return {"bfloat16": 0.23, "float16": 0.3}[dtype] if _has(dtype, device) else _EMULATED[dtype]


def _has(dtype: str, device: str) -> bool:
    if dtype == "float32":
        return True
    if torch.device(device).type == "cuda":  # Volta has float16, too
        first = {"bfloat16": (8, 0), "float16": (7, 0)}[dtype]
        return torch.cuda.get_device_capability(device) >= first
    return _has_bfloat16() if dtype == "bfloat16" else torch.backends.cpu.get_cpu_capability() == "AVX512"


def _on_cpu(quant: str, folder: ModelFolder) -> float:
    if quant == "int8":
        if fast_quant("cpu") != "int8":
            return _GUESS
        # Rust reads weights of up to 8 bits as they are, so there is nothing to gain for them.
        return 2.4 if found_block_bytes(folder) is None else 0.6
    return {"none": 1.0, "nf4": 0.1}[quant]


def _on_gpu(quant: str) -> float:
    """1.3 for 16 rows at once in nf4, 0.9 for a prompt; a guess for int8."""
    return {"none": 1.0, "nf4": 1.15, "int8": 0.5}[quant]


def _has_bfloat16() -> bool:
    """Whether the CPU multiplies it. torch has no public name for that which all our versions know."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
