"""When the Rust extension lets other threads run, and that they agree."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pytest

from llmnode import _native
from unit.blocks_of_ones import llama, llama_block, slabs

Buffer: TypeAlias = Any  # whatever has, or lacks, the buffer protocol: before Python 3.12 that has no type


LONG_BYTES = 8 * 1024 * 1024  # well past the size from which the GIL is released (1 MiB)


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


@pytest.mark.usefixtures("no_forced_switches")
def test_a_forward_of_several_threads_lets_other_threads_run() -> None:
    blocks, state, own = llama(llama_block(), threads=2), np.ones((4, 16), np.float32).tobytes(), slabs()
    assert another_thread_runs_during(lambda: blocks.forward(0, 1, [(own, 0, 0, state)]), most_calls=1000)
    assert blocks.forward(0, 1, [(own, 0, 0, state)]) == llama(llama_block()).forward(0, 1, [(slabs(), 0, 0, state)])
