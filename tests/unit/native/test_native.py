"""The Rust extension as Python sees it: which buffers it takes, what it refuses, when it lets other threads run.

That the algorithms are right is proved in `transport_rs/tests`; here a twin or a vector for each shows that the bytes
arrive.
"""

from __future__ import annotations

import array
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """Threads change only where the running one releases the GIL by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    yield
    sys.setswitchinterval(before)


def another_thread_runs_during(call: Callable[[], object], most_calls: int) -> bool:
    """Whether a thread that waits for nothing but the GIL gets it within `most_calls`.

    No call has to hand the GIL over: the kernel may wake the other thread too late for the first ones.
    """
    gate = threading.Lock()
    gate.acquire()
    progress: list[str] = []

    def waiter() -> None:
        gate.acquire()
        progress.append("ran")

    thread = threading.Thread(target=waiter)
    thread.start()
    gate.release()
    ran = False
    for _ in range(most_calls):
        call()
        if progress:
            ran = True
            break
    thread.join()
    return ran


LONG = bytes(LONG_BYTES)
QUANTIZED = bytes(_native.quantized_bytes(LONG_BYTES // 4))
PACKED = _native.pack(LONG, 4)
LONG_CALLS: dict[str, Callable[[], object]] = {
    "crc32c": lambda: _native.crc32c(LONG),
    "frame_crc32c": lambda: _native.frame_crc32c([b"head", LONG]),
    "blake3_digest": lambda: _native.blake3_digest(LONG),
    "blake3_digest_parts": lambda: _native.blake3_digest_parts([b"head", LONG]),
    "quantize_blockwise": lambda: _native.quantize_blockwise(LONG, "float32"),
    "pack": lambda: _native.pack(LONG, 4),
    "unpack": lambda: _native.unpack(PACKED, LONG_BYTES),
    "dequantize_blockwise": lambda: _native.dequantize_blockwise(QUANTIZED, "float32", LONG_BYTES // 4),
}


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("call", LONG_CALLS.values(), ids=LONG_CALLS.keys())
def test_a_long_call_lets_other_threads_run(call: Callable[[], object]) -> None:
    assert another_thread_runs_during(call, most_calls=1000)


@pytest.mark.usefixtures("no_forced_switches")
def test_a_short_call_keeps_the_gil() -> None:
    # Taking it back beside a busy thread can last a whole switch interval, for every frame. This is also the control of
    # the test above.
    assert not another_thread_runs_during(lambda: _native.crc32c(b"a small frame"), most_calls=1000)


def test_threads_that_share_a_buffer_agree() -> None:
    data = np.arange(LONG_BYTES // 4, dtype=np.uint32)
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_native.blake3_digest, [data] * 8))
        checksums = list(pool.map(_native.crc32c, [data] * 8))
    assert set(digests) == {_native.blake3_digest(data)}
    assert set(checksums) == {_native.crc32c(data)}


def test_a_buffer_is_let_go_after_the_call() -> None:
    data = bytearray(b"some bytes")
    _native.crc32c(data)
    _native.blake3_digest_parts([data, data])
    with pytest.raises(BufferError):
        _native.blake3_digest_parts([data, memoryview(data)[::2]])
    data.append(0)  # raises BufferError while anyone holds a view


def test_the_version_is_that_of_the_crate() -> None:
    assert _native.__version__.count(".") == 2


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


def test_blocks_of_ones_add_up() -> None:
    """A state of ones is normed to ones: values of 16, gated products of 16 * 16, and sums of 16 of each."""
    state = np.ones(16, np.float32).tobytes()
    [first], [second] = (
        llama(llama_block()).forward(0, 1, [(slabs(), 0, 0, state)]),
        llama().forward(0, 0, [(slabs(0), 0, 0, state)]),
    )
    attended = 1 + 16 * 16
    np.testing.assert_allclose(np.frombuffer(first, np.float32), attended + 16 * 16 * 16, rtol=1e-5)
    assert second == state


def test_keys_and_values_are_kept_where_the_slabs_are() -> None:
    keys, values = np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32)
    llama(llama_block()).forward(
        0, 1, [(_native.SequenceSlabs([(keys, values)], 4), 0, 2, np.ones(16, np.float32).tobytes())]
    )
    np.testing.assert_allclose(values[0], [[0] * 16, [0] * 16, [16] * 16, [0] * 16], rtol=1e-5)
    assert keys[0, 2].any() and not keys[0, :2].any() and not keys[0, 3:].any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"qkv": np.ones((47, 16), np.float32)}, ValueError),
        ({"qkv": np.ones((48, 16), np.float64)}, TypeError),
        ({"qkv": np.ones((16, 48), np.float32).T}, TypeError),
        ({"qkv": np.frombuffer(b"x" * (48 * 64 + 1), np.uint8)[1:].view(np.float32)}, TypeError),
        ({"qkv": None}, TypeError),
        ({"window": -1}, TypeError),
        ({"window": 0}, ValueError),
        ({"down_bias": np.ones(15, np.float32)}, ValueError),
    ],
)
def test_blocks_of_wrong_weights_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        llama(llama_block(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"hidden": 15}, {"heads": 0}, {"kv_heads": 2}, {"inner": 1 << 60}, {"head_dim": 1 << 63}, {"frequencies": [0.5]}],
)
def test_blocks_of_wrong_sizes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|as the shape says"):
        llama(llama_block(), **changes)


@pytest.mark.usefixtures("no_forced_switches")
def test_a_forward_of_several_threads_lets_other_threads_run() -> None:
    blocks, state, own = llama(llama_block(), threads=2), np.ones((4, 16), np.float32).tobytes(), slabs()
    assert another_thread_runs_during(lambda: blocks.forward(0, 1, [(own, 0, 0, state)]), most_calls=1000)
    assert blocks.forward(0, 1, [(own, 0, 0, state)]) == llama(llama_block()).forward(0, 1, [(slabs(), 0, 0, state)])


def test_forwards_that_do_not_fit_are_refused() -> None:
    blocks, state, own = llama(llama_block()), np.ones(16, np.float32).tobytes(), slabs()
    for first, end, pieces in [
        (0, 1, [(own, 0, 4, state)]),
        (0, 1, [(own, 0, 0, state[1:])]),
        (1, 2, [(own, 0, 0, state)]),
        (1, 0, [(own, 0, 0, state)]),
        (0, 1 << 63, [(own, 0, 0, state)]),
        (0, 2, [(slabs(2), 0, 0, state)]),
        (0, 1, [(own, 1, 0, state)]),
        (0, 1, [(own, 1 << 63, 0, state)]),
        (0, 1, [(own, 0, 0, state), (slabs(0), 0, 0, state)]),
        (0, 1, [(_native.SequenceSlabs([(np.zeros(48, np.float32), np.zeros(64, np.float32))], 4), 0, 0, state)]),
        (0, 1, [(_native.SequenceSlabs([(np.zeros(128, np.int8), np.zeros(7, np.float32))], 4), 0, 0, state)]),
    ]:
        with pytest.raises(ValueError, match=r"room|as many values|not here"):
            blocks.forward(first, end, pieces)
    with pytest.raises(RuntimeError, match="borrowed"):
        blocks.forward(0, 1, [(own, 0, 0, state), (own, 0, 1, state)])
    assert blocks.forward(0, 1, []) == []
    one = np.zeros((1, 4, 16), np.float32)
    with pytest.raises(ValueError, match="overlap"):
        _native.SequenceSlabs([(one, one[:, 1:])], 4)
    with pytest.raises(ValueError, match="overlap"):
        _native.SequenceSlabs([(one.view(np.int8), one)], 4)
    for whole in (one, one.view(np.int8)):
        with pytest.raises(BufferError, match="read-only"):
            _native.SequenceSlabs([(readonly(whole), np.zeros((1, 4, 16), np.float32))], 4)
