"""The blockwise codec as Python sees it: error bounds against NumPy, the published map, what is refused.

That all instruction sets give the same bits as the specification is proved in `transport_rs/tests/codec/`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmnode import _native

Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
Code: TypeAlias = Literal["linear", "dynamic"]

DTYPES: list[Dtype] = ["float32", "float16", "bfloat16"]
CODES: list[Code] = ["linear", "dynamic"]
BLOCKS = [64, 128, 256, 512, 1024, 2048, 4096]
HALF_STEP = {"linear": 0.5 / 127, "dynamic": 0.45 / 64}  # of the scale: half the widest distance of two levels
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}  # of a value
SMALLEST = {"float32": 2**-149, "float16": 2**-24, "bfloat16": 2**-133}

dtypes = st.sampled_from(DTYPES)
codes = st.sampled_from(CODES)
blocks = st.sampled_from(BLOCKS)
values = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-60000, 60000, width=32)) | st.builds(
    lambda array, exponent: (array * np.float32(10.0**exponent)).astype(np.float32),
    hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1, 1, width=32)),
    st.integers(-44, 4),
)


def as_dtype(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """The values rounded to `dtype`; bfloat16, which NumPy has not, as the bits."""
    if dtype == "bfloat16":
        return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    return values.astype(dtype)


def as_float64(data: Any, dtype: Dtype) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype).astype(np.float64)


def published_map() -> NDArray[np.float64]:
    """Dettmers et al.: decades of 1, 2, 4 ... 64 cells of [0.1, 1], their middles, their negatives, 0 and 1."""
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        levels += [*middles, *-middles]
    return np.sort(levels)


def absmax_of_blocks(values: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """The largest magnitude in the block of each value."""
    padded = np.pad(np.abs(values), (0, -len(values) % block)).reshape(-1, block)
    return np.repeat(padded.max(axis=1), block)[: len(values)]


@given(values, dtypes, codes, blocks)
def test_a_value_comes_back_within_half_a_step(values: NDArray[Any], dtype: Dtype, code: Code, block: int) -> None:
    data = as_dtype(values, dtype)
    encoded = _native.quantize_blockwise(data, dtype, block=block, code=code)
    assert len(encoded) == _native.quantized_bytes(len(data), block) == len(data) + 4 * math.ceil(len(data) / block)
    exact = as_float64(data.tobytes(), dtype)
    back = as_float64(_native.dequantize_blockwise(encoded, dtype, len(data), block=block, code=code), dtype)
    bound = absmax_of_blocks(exact, block) * (HALF_STEP[code] + ROUNDING[dtype] + 5e-7) + SMALLEST[dtype]
    assert np.all(np.abs(back - exact) <= bound)


@given(values, codes, blocks)
def test_scales_are_the_largest_magnitudes(values: NDArray[np.float32], code: Code, block: int) -> None:
    encoded = _native.quantize_blockwise(values, "float32", block=block, code=code)
    scales = np.frombuffer(encoded, "<f4", count=math.ceil(len(values) / block))
    expected = [np.abs(values[start : start + block]).max() for start in range(0, len(values), block)]
    assert np.array_equal(scales, np.array(expected, np.float32))


@given(values)
def test_linear_is_its_numpy_twin(values: NDArray[np.float32]) -> None:
    encoded = _native.quantize_blockwise(values, "float32", code="linear")
    found = np.frombuffer(encoded, np.int8, offset=len(encoded) - len(values)).astype(np.int64)
    exact = values.astype(np.float64)
    absmax = absmax_of_blocks(exact, 64)
    position = np.divide(exact * 127, absmax, out=np.zeros_like(exact), where=absmax > 0)
    assert np.all(np.abs(found - position) <= 0.5 + 2e-5)  # the nearest; a tie may fall to either side


@given(values)
def test_dynamic_is_its_numpy_twin(values: NDArray[np.float32]) -> None:
    encoded = _native.quantize_blockwise(values, "float32", code="dynamic")
    found = published_map()[np.frombuffer(encoded, np.uint8, offset=len(encoded) - len(values))]
    exact = values.astype(np.float64)
    absmax = absmax_of_blocks(exact, 64)
    position = np.divide(exact, absmax, out=np.zeros_like(exact), where=absmax > 0)
    nearest = np.abs(position[:, None] - published_map()).min(axis=1)
    assert np.all(np.abs(found - position) <= nearest + 2e-6 * np.abs(position))


def test_dynamic_levels_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map().numpy()
    scaled = struct.pack("<4f", 1, 1, 1, 1) + bytes(range(256))
    ours = np.frombuffer(_native.dequantize_blockwise(scaled, "float32", 256), np.float32)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("block", [64, 256, 4096])
def test_dynamic_codes_are_those_of_bitsandbytes(block: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = np.random.default_rng(0).standard_normal(3 * 4096).astype(np.float32)
    theirs, state = functional.quantize_blockwise(torch.from_numpy(values), blocksize=block)
    encoded = _native.quantize_blockwise(values, "float32", block=block)
    scale_bytes = len(encoded) - len(values)
    assert encoded[:scale_bytes] == state.absmax.numpy().tobytes()
    ours = np.frombuffer(encoded, np.uint8, offset=scale_bytes)
    differ = ours != theirs.numpy()
    # Theirs comes from a coarser table: where the two differ, ours is the nearer level.
    assert np.count_nonzero(differ) <= len(values) * 1e-2
    position = (values / np.repeat(state.absmax.numpy(), block).astype(np.float64))[differ]
    our_error, their_error = (np.abs(published_map()[found[differ]] - position) for found in (ours, theirs.numpy()))
    assert np.all(our_error <= their_error + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
def test_zeros_and_denormals_survive(dtype: Dtype, code: Code) -> None:
    for value in (0.0, SMALLEST[dtype], 3 * SMALLEST[dtype]):
        data = as_dtype(np.array([value, 0, value], np.float32), dtype)
        encoded = _native.quantize_blockwise(data, dtype, code=code)
        assert _native.dequantize_blockwise(encoded, dtype, 3, code=code) == data.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
def test_nothing_is_quantized_to_nothing(dtype: Dtype, code: Code) -> None:
    assert _native.quantize_blockwise(b"", dtype, code=code, threads=4) == b""
    assert _native.dequantize_blockwise(b"", dtype, 0, code=code, threads=4) == b""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("culprit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 63, 64, 999])
def test_the_first_value_that_is_not_finite_is_named(dtype: Dtype, culprit: float, index: int) -> None:
    values = np.ones(1000, np.float32)
    values[[index, 999]] = culprit
    with pytest.raises(ValueError, match=rf"^value {index} is not finite"):
        _native.quantize_blockwise(as_dtype(values, dtype), dtype)


@given(st.binary(max_size=600), dtypes, codes, st.integers(0, 600))
def test_any_bytes_are_finite_values_or_refused(data: bytes, dtype: Dtype, code: Code, count: int) -> None:
    try:
        back = _native.dequantize_blockwise(data, dtype, count, code=code)
    except ValueError:
        return
    assert np.all(np.isfinite(as_float64(back, dtype)))


@given(st.integers(1, 300), st.floats(0, float(np.finfo(np.float32).max), width=32), codes, dtypes, st.randoms())
def test_any_codes_stay_below_the_scale(count: int, scale: float, code: Code, dtype: Dtype, random: Any) -> None:
    data = struct.pack("<f", scale) * math.ceil(count / 64) + random.randbytes(count)
    if scale > {"float32": math.inf, "float16": 65504, "bfloat16": 0xFF * 2.0**120}[dtype]:
        with pytest.raises(ValueError, match="scale of block 0"):
            _native.dequantize_blockwise(data, dtype, count, code=code)
        return
    back = as_float64(_native.dequantize_blockwise(data, dtype, count, code=code), dtype)
    assert np.all(np.abs(back) <= scale * (1 + ROUNDING[dtype]) + SMALLEST[dtype])


@pytest.mark.parametrize("scale", [-1.0, -1e-45, math.nan, math.inf, -math.inf])
def test_a_corrupt_scale_is_refused(scale: float) -> None:
    data = struct.pack("<2f", 1.0, scale) + bytes(100)
    with pytest.raises(ValueError, match="scale of block 1"):
        _native.dequantize_blockwise(data, "float32", 100)


@pytest.mark.parametrize("count", [0, 95, 97, 100, 2**40, 2**63])
def test_a_wrong_count_is_refused_before_memory_is_reserved(count: int) -> None:
    with pytest.raises(ValueError, match="encoded in"):
        _native.dequantize_blockwise(bytes(104), "float32", count)


def test_wrong_arguments_are_refused() -> None:
    refused: dict[str, Callable[[], object]] = {
        "take float32, float16 or bfloat16": lambda: _native.quantize_blockwise(b"", "float64"),  # type: ignore[arg-type]
        "take linear or dynamic": lambda: _native.quantize_blockwise(b"", "float32", code="nf4"),  # type: ignore[arg-type]
        "power of two": lambda: _native.quantize_blockwise(b"", "float32", block=100),
        "block 32": lambda: _native.quantized_bytes(1, 32),
        "any memory": lambda: _native.quantized_bytes(2**64 - 1),
        "no whole number": lambda: _native.quantize_blockwise(b"abc", "float16"),
        "7 bytes are not": lambda: _native.quantize_blockwise_into(bytes(8), "float32", bytearray(7)),
        "9 bytes are not": lambda: _native.dequantize_blockwise_into(bytes(9), "float32", bytearray(8)),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(OverflowError):
        _native.dequantize_blockwise(b"", "float32", -1)
    with pytest.raises(BufferError, match="read-only"):
        _native.quantize_blockwise_into(bytes(8), "float32", bytes(6))
    with pytest.raises(BufferError, match="not C-contiguous"):
        _native.quantize_blockwise(np.zeros((4, 4), np.float32).T, "float32")


def test_input_and_output_may_not_overlap() -> None:
    memory = bytearray(100)
    with pytest.raises(ValueError, match="overlaps"):
        _native.quantize_blockwise_into(memoryview(memory)[:40], "float32", memoryview(memory)[39:53])
    with pytest.raises(ValueError, match="overlaps"):
        _native.dequantize_blockwise_into(memoryview(memory)[:14], "float32", memoryview(memory)[10:50])
    _native.quantize_blockwise_into(memoryview(memory)[:40], "float32", memoryview(memory)[40:54])


@given(values, dtypes, codes, blocks)
def test_into_gives_the_same_bytes(values: NDArray[Any], dtype: Dtype, code: Code, block: int) -> None:
    data = as_dtype(values, dtype)
    encoded = bytearray(_native.quantized_bytes(len(data), block))
    _native.quantize_blockwise_into(data, dtype, encoded, block=block, code=code)
    assert encoded == _native.quantize_blockwise(data, dtype, block=block, code=code)
    back = np.empty_like(data)
    _native.dequantize_blockwise_into(encoded, dtype, back, block=block, code=code)
    assert back.tobytes() == _native.dequantize_blockwise(encoded, dtype, len(data), block=block, code=code)


@pytest.mark.parametrize("threads", [0, 2, 3, 2**64 - 1])
def test_threads_change_nothing(threads: int) -> None:
    values = np.random.default_rng(1).standard_normal(5_000_001).astype(np.float32)
    encoded = _native.quantize_blockwise(values, "float32")
    assert _native.quantize_blockwise(values, "float32", threads=threads) == encoded
    back = _native.dequantize_blockwise(encoded, "float32", len(values))
    assert _native.dequantize_blockwise(encoded, "float32", len(values), threads=threads) == back


def test_a_row_is_quantized_as_if_it_were_alone() -> None:
    rows = np.random.default_rng(2).standard_normal((5, 576)).astype(np.float32)
    together = np.frombuffer(
        _native.dequantize_blockwise(_native.quantize_blockwise(rows, "float32"), "float32", rows.size), np.float32
    ).reshape(rows.shape)
    for row, expected in zip(rows, together, strict=True):
        alone = _native.dequantize_blockwise(_native.quantize_blockwise(row, "float32"), "float32", row.size)
        assert alone == expected.tobytes()
