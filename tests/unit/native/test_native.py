"""The Rust extension as Python sees it: which buffers it takes, what it refuses.

That the algorithms are right is proved in `transport_rs/tests`; here a twin or a vector for each shows that the bytes
arrive.
"""

import array
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmnode import _native

Buffer: TypeAlias = Any  # whatever has, or lacks, the buffer protocol: before Python 3.12 that has no type


LONG_BYTES = 8 * 1024 * 1024  # well past the size from which the GIL is released (1 MiB)
FUNCTIONS_OF_DATA: list[Callable[[Buffer], object]] = [_native.crc32c, _native.blake3_digest]
FUNCTIONS_OF_PARTS: list[Callable[[Sequence[Buffer]], object]] = [_native.frame_crc32c, _native.blake3_digest_parts]


def crc32c_twin(data: bytes, seed: int = 0) -> int:
    """Long division, one bit at a time."""
    register = seed ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def readonly(values: NDArray[np.float32]) -> NDArray[np.float32]:
    values.flags.writeable = False
    return values


BUFFERS: dict[str, Buffer] = {
    "bytes": b"some bytes",
    "empty bytes": b"",
    "bytearray": bytearray(b"some bytes"),
    "empty bytearray": bytearray(),
    "memoryview": memoryview(b"some bytes"),
    "slice of a memoryview": memoryview(b"some bytes")[3:7],
    "empty slice of a memoryview": memoryview(b"some bytes")[3:3],
    "writable memoryview": memoryview(bytearray(b"some bytes"))[1:],
    "array of doubles": array.array("d", [1.5, -2.5]),
    "numpy uint8": np.arange(100, dtype=np.uint8),
    "numpy float32": np.linspace(-1, 1, 33, dtype=np.float32),
    "numpy float32 2-D": np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7),
    "rows of a numpy array": np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)[2:4],
    "numpy float16": np.linspace(-1, 1, 33, dtype=np.float16),
    "numpy big-endian": np.arange(9, dtype=">i4"),
    "numpy bool": np.array([True, False, True]),
    "numpy structured": np.zeros(3, dtype=[("a", "i2"), ("b", "f8")]),
    "numpy misaligned": np.frombuffer(bytearray(41), dtype=np.float32, offset=1),
    "numpy readonly": readonly(np.linspace(-1, 1, 33, dtype=np.float32)),
    "numpy empty": np.zeros((0, 7), dtype=np.float32),
}

NOT_CONTIGUOUS: dict[str, Buffer] = {
    "every other byte": memoryview(b"some bytes")[::2],
    "backwards": memoryview(b"some bytes")[::-1],
    "every other float": np.zeros(10, dtype=np.float32)[::2],
    "columns": np.zeros((4, 6), dtype=np.float32)[:, 1:3],
    "transposed": np.zeros((4, 6), dtype=np.float32).T,
    "column-major": np.asfortranarray(np.zeros((4, 6), dtype=np.float32)),
}


@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS.keys())
def test_any_contiguous_buffer_is_read_as_its_bytes(buffer: Buffer) -> None:
    flat = memoryview(buffer).tobytes()
    assert _native.crc32c(buffer) == crc32c_twin(flat)
    assert _native.frame_crc32c([b"head", buffer]) == crc32c_twin(b"head" + flat)
    assert _native.blake3_digest(buffer) == _native.blake3_digest(flat)
    assert _native.blake3_digest_parts([b"head", buffer]) == _native.blake3_digest(b"head" + flat)


@pytest.mark.parametrize("buffer", NOT_CONTIGUOUS.values(), ids=NOT_CONTIGUOUS.keys())
def test_a_buffer_that_is_not_c_contiguous_is_refused(buffer: Buffer) -> None:
    for of_data in FUNCTIONS_OF_DATA:
        with pytest.raises(BufferError, match="not C-contiguous"):
            of_data(buffer)
    for of_parts in FUNCTIONS_OF_PARTS:
        with pytest.raises(BufferError, match="not C-contiguous"):
            of_parts([b"", buffer])


def test_a_buffer_without_a_shape_is_refused() -> None:
    with pytest.raises(BufferError, match="shape"):
        _native.crc32c(np.array(1.0, dtype=np.float32))


@pytest.mark.parametrize("thing", [None, 7, "text", [1, 2], object()], ids=repr)
def test_what_is_no_buffer_is_refused(thing: Buffer) -> None:
    for of_data in FUNCTIONS_OF_DATA:
        with pytest.raises(TypeError, match="bytes-like"):
            of_data(thing)
    for of_parts in FUNCTIONS_OF_PARTS:
        with pytest.raises(TypeError, match="bytes-like"):
            of_parts([thing])


@pytest.mark.parametrize(
    "thing", [None, 7, b"bytes", "text", {b"a": 1}, iter([b"a"])], ids=lambda thing: type(thing).__name__
)
def test_parts_that_are_no_sequence_of_buffers_are_refused(thing: Sequence[Buffer]) -> None:
    for of_parts in FUNCTIONS_OF_PARTS:
        with pytest.raises(TypeError):
            of_parts(thing)


class BoastfulSequence(Sequence[bytes]):
    """Claims more parts than any memory holds."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]  # slices are never asked for
        return [b"some ", b"bytes"][index]


def test_parts_may_lie_about_their_number() -> None:
    assert _native.frame_crc32c(BoastfulSequence()) == crc32c_twin(b"some bytes")


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, -(2**64)])
def test_a_seed_outside_32_bits_is_refused(seed: int) -> None:
    with pytest.raises(OverflowError):
        _native.crc32c(b"data", seed)


def test_a_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        _native.crc32c(b"data", 1.0)  # type: ignore[arg-type]  # that is the point


def test_blake3_gives_the_official_vectors() -> None:
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    of_102400 = "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"
    official_input = (bytes(range(251)) * 408)[:102400]
    assert _native.blake3_digest(b"").hex() == empty
    assert _native.blake3_digest_parts([]).hex() == empty
    assert _native.blake3_digest(official_input).hex() == of_102400


@given(st.binary(max_size=2048), st.integers(0, 2**32 - 1))
def test_crc32c_is_its_twin(data: bytes, seed: int) -> None:
    assert _native.crc32c(data, seed) == crc32c_twin(data, seed)
    assert _native.crc32c(data=data, seed=seed) == crc32c_twin(data, seed)


@given(st.lists(st.binary(max_size=2048), max_size=8))
def test_parts_count_as_if_joined(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert _native.frame_crc32c(parts) == _native.frame_crc32c(tuple(parts)) == crc32c_twin(whole)
    assert _native.blake3_digest_parts(parts) == _native.blake3_digest(whole)


@given(st.binary(max_size=2048), st.data())
def test_crc32c_goes_on_from_any_split(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    assert _native.crc32c(data[cut:], _native.crc32c(data[:cut])) == _native.crc32c(data)


@pytest.mark.parametrize("width", [2, 4])
def test_numbers_are_within_a_limit_by_their_bits(width: int) -> None:
    last = (1 << (8 * width - 1) | 5).to_bytes(width, "little")  # -5, if bits counted
    data = bytearray(6 * width) + last
    assert _native.are_within(data, width, 5) and not _native.are_within(data, width, 4)
    assert not _native.are_within(data, width, 5, signed=False)
    assert _native.are_within(b"", width, 0)
    with pytest.raises(ValueError, match="no whole number"):
        _native.are_within(data[1:], width, 5)
    with pytest.raises(ValueError, match="2 or 4 bytes, not 3"):
        _native.are_within(data, 3, 5)
    with pytest.raises(OverflowError):
        _native.are_within(data, width, 1 << 32)


@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS.keys())
@pytest.mark.parametrize("width", [2, 4])
def test_any_contiguous_buffer_comes_back_from_packing(buffer: Buffer, width: int) -> None:
    flat = memoryview(buffer).tobytes()
    packed = _native.pack(buffer, width)
    for form in (packed, bytearray(packed), memoryview(packed)):
        unpacked = _native.unpack(form, len(flat))
        assert isinstance(unpacked, bytearray) and unpacked == flat


def test_the_exponents_of_numbers_are_packed() -> None:
    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    for data, most in ((values, 0.87), (values.astype(np.float16), 0.88), (values.view(np.uint16)[1::2].copy(), 0.72)):
        assert len(_native.pack(data, data.itemsize)) < most * data.nbytes


@pytest.mark.parametrize("width", [0, 1, 3, 8])
def test_numbers_of_other_widths_are_not_packed(width: int) -> None:
    with pytest.raises(ValueError, match=f"{width} bytes: only"):
        _native.pack(bytes(16), width)


def test_what_would_be_more_than_allowed_is_not_unpacked() -> None:
    packed = _native.pack(bytes(1000), 4)
    assert len(packed) < 400
    assert _native.unpack(packed, 1000) == bytes(1000)
    with pytest.raises(ValueError, match="1000 bytes are packed, at most 999"):
        _native.unpack(packed, 999)


@given(st.binary(max_size=100))
def test_noise_does_not_unpack(noise: bytes) -> None:
    with pytest.raises(ValueError, match="packed"):
        _native.unpack(b"\x03" + noise, 1 << 20)


def test_a_buffer_is_let_go_after_the_call() -> None:
    data = bytearray(b"some bytes")
    _native.crc32c(data)
    _native.blake3_digest_parts([data, data])
    with pytest.raises(BufferError):
        _native.blake3_digest_parts([data, memoryview(data)[::2]])
    data.append(0)  # raises BufferError while anyone holds a view


def test_the_version_is_that_of_the_crate() -> None:
    assert _native.__version__.count(".") == 2
