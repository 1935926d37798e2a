"""`tests/bench/run codec`: the blockwise 8-bit codec of activations beside other code for it, on one core.

The others are a copy of the same bytes, plain NumPy and torch code, and bitsandbytes' blockwise functions. All take
turns within each round, and a ratio compares two values of one round. The codec and the copy write into existing
memory, the others reserve theirs. GB/s are always those of the values, not of the codes.

Further rows are of packing without loss (`packing.py`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from bench.codec import packing
from bench.kit.options import add_repeats
from bench.kit.report import Report, Row, at_least, ratios, rounds, spread
from llmnode import _native

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from bench.kit.options import Options
    from bench.kit.report import Aim

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
Code: TypeAlias = Literal["linear", "dynamic"]
Array: TypeAlias = "NDArray[Any]"

BLOCK = 64
VALUES = 4 * 1024 * 1024
CALLS = 5  # the fastest counts, since the first find cold caches, and other programs use the cores
OURS, TWO_THREADS, MEMCPY, BITSANDBYTES = "llmnode", "llmnode, 2 threads", "memcpy", "bitsandbytes"


@dataclass(slots=True)
class _Operation:
    """One direction for one dtype and code map: the functions that can do it, and their times in each round."""

    dtype: Dtype
    name: str
    calls: Mapping[str, Callable[[], object]]
    value_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def speeds(self, who: str) -> list[float]:
        return [self.value_bytes / seconds / 1e9 for seconds in self.seconds[who]]

    def ratios(self, other: str) -> list[float]:
        return ratios(self.seconds[other], self.seconds[OURS])


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser)


def run(options: Options) -> Report:
    operations, packed = list(_operations()), list(packing.packings())
    for number in rounds(options.repeats):
        for operation in operations:
            for who, call in operation.calls.items():
                seconds = min(_seconds(call) for _ in range(CALLS))
                if number >= 0:
                    operation.seconds.setdefault(who, []).append(seconds)
        for payload in packed:
            payload.measure(keep=number >= 0)
    conditions = {
        "bitsandbytes": importlib.metadata.version("bitsandbytes"),
        "values": VALUES,
        "block": BLOCK,
    }
    rows = [*(_row(operation) for operation in operations), *(payload.row() for payload in packed)]
    return Report(rows, [*_aims(operations), *packing.aims(packed)], conditions)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _row(operation: _Operation) -> Row:
    row: Row = {"values": operation.dtype, "operation": operation.name}
    row |= {f"{who}, GB/s": spread(operation.speeds(who)) for who in operation.calls}
    return row | {f"of {other}": spread(operation.ratios(other)) for other in (MEMCPY, BITSANDBYTES)}


def _aims(operations: list[_Operation]) -> Iterator[Aim]:
    """An aim for the worst dtype of each code map."""

    def worst(name: str, other: str) -> float:
        return min(statistics.median(op.ratios(other)) for op in operations if op.name == name)

    for direction, other, least in (("quantize", BITSANDBYTES, 10), ("dequantize", MEMCPY, 0.5)):
        for code in ("linear", "dynamic"):
            name = f"{direction} {code}"
            yield at_least(f"{name}, of {other}, worst dtype", worst(name, other), least)


def _operations() -> Iterator[_Operation]:
    normal = torch.from_numpy(np.random.default_rng(0).standard_normal(VALUES, dtype=np.float32))
    dtypes: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
    codes: tuple[Code, ...] = ("linear", "dynamic")
    for dtype in dtypes:
        values = normal.to(getattr(torch, dtype))
        for code in codes:
            yield from _both_ways(values, dtype, code)


def _both_ways(values: torch.Tensor, dtype: Dtype, code: Code) -> Iterator[_Operation]:
    data = values.view(torch.uint8).numpy()
    encoded = np.empty(_native.quantized_bytes(VALUES, BLOCK), np.uint8)
    decoded = torch.empty_like(values)
    out = decoded.view(torch.uint8).numpy()

    def quantize(threads: int) -> None:
        _native.quantize_blockwise_into(data, dtype, encoded, block=BLOCK, code=code, threads=threads)

    def dequantize(threads: int) -> None:
        _native.dequantize_blockwise_into(encoded, dtype, out, block=BLOCK, code=code, threads=threads)

    in_numpy, in_torch, in_bitsandbytes = _Numpy(values, code), _Torch(values, code), _Bitsandbytes(values, code)
    quantize(1)
    first: dict[str, dict[str, Callable[[], object]]] = {
        "quantize": {OURS: lambda: quantize(1), TWO_THREADS: lambda: quantize(2)},
        "dequantize": {OURS: lambda: dequantize(1), TWO_THREADS: lambda: dequantize(2)},
    }
    for direction, calls in first.items():
        calls[MEMCPY] = lambda: np.copyto(out, data)
        calls["numpy"] = getattr(in_numpy, direction)
        calls["torch"] = getattr(in_torch, direction)
        calls[BITSANDBYTES] = getattr(in_bitsandbytes, direction)
        yield _Operation(dtype, f"{direction} {code}", calls, len(data))


def _levels(code: Code) -> NDArray[np.float32]:
    """The levels in rising order, by our own decoder. The linear map has those of 255 codes."""
    every_code = np.ones(4, "<f4").tobytes() + bytes(range(256))
    return np.unique(np.frombuffer(_native.dequantize_blockwise(every_code, "float32", 256, code=code), np.float32))


class _Numpy:
    """The plain code. NumPy has no bfloat16, which is the upper half of a float32."""

    def __init__(self, values: torch.Tensor, code: Code) -> None:
        self.code = code
        self.levels = _levels(code)
        self.middles = (self.levels[1:] + self.levels[:-1]) / 2
        self.is_bfloat16 = values.dtype == torch.bfloat16
        self.values: Array = values.view(torch.uint16).numpy() if self.is_bfloat16 else values.numpy()
        self.scales: Array = np.empty(0)
        self.codes: Array = np.empty(0)

    def quantize(self) -> None:
        values: Array = self.values
        if self.is_bfloat16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        rows = values.astype(np.float32, copy=False).reshape(-1, BLOCK)
        self.scales = np.abs(rows).max(axis=1, keepdims=True)
        if self.code == "linear":
            self.codes = np.rint(rows * (127 / self.scales)).astype(np.int8)
        else:
            self.codes = np.searchsorted(self.middles, rows / self.scales).astype(np.uint8)

    def dequantize(self) -> Array:
        levels: Array = self.codes * np.float32(1 / 127) if self.code == "linear" else self.levels[self.codes]
        values: Array = levels * self.scales
        if self.is_bfloat16:
            bits = values.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return values.astype(self.values.dtype, copy=False)


class _Torch:
    """The plain code."""

    def __init__(self, values: torch.Tensor, code: Code) -> None:
        self.values, self.code = values, code
        self.levels = torch.from_numpy(_levels(code))
        self.middles = (self.levels[1:] + self.levels[:-1]) / 2
        self.scales = torch.empty(0)
        self.codes = torch.empty(0)

    def quantize(self) -> None:
        rows = self.values.float().view(-1, BLOCK)
        self.scales = rows.abs().amax(dim=1, keepdim=True)
        if self.code == "linear":
            self.codes = (rows * (127 / self.scales)).round().to(torch.int8)
        else:
            self.codes = torch.bucketize(rows / self.scales, self.middles, out_int32=True).to(torch.uint8)

    def dequantize(self) -> torch.Tensor:
        levels = self.codes * (1 / 127) if self.code == "linear" else self.levels[self.codes.int()]
        return (levels * self.scales).to(self.values.dtype)


class _Bitsandbytes:
    """bitsandbytes' functions take any map of 256 levels. On a CPU they cannot write into given memory."""

    def __init__(self, values: torch.Tensor, code: Code) -> None:
        functional: Any = importlib.import_module("bitsandbytes.functional")  # untyped; the import takes seconds
        self.functional = functional
        self.values = values
        self.map = functional.create_dynamic_map() if code == "dynamic" else functional.create_linear_map()
        self.codes: Any = None
        self.state: Any = None

    def quantize(self) -> None:
        self.codes, self.state = self.functional.quantize_blockwise(self.values, code=self.map, blocksize=BLOCK)

    def dequantize(self) -> torch.Tensor:
        decoded: torch.Tensor = self.functional.dequantize_blockwise(self.codes, self.state)
        return decoded
