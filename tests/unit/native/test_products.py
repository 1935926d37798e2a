"""Products in Rust with weights in any form, and those forms: what Python is promised, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmnode import _native

if TYPE_CHECKING:
    from collections.abc import Callable


CODES, STEPS = np.arange(-32, 32, dtype=np.int8).reshape(2, 32), np.array([[0.5], [2]], dtype=np.float32)
WEIGHT = CODES * STEPS


def test_a_product_is_that_of_the_weight_in_any_form() -> None:
    rows = np.arange(96, dtype=np.float32).reshape(3, 32)
    halves = (WEIGHT.view(np.uint32) >> 16).astype(np.uint16)
    weights: list[Any] = [WEIGHT, ("bfloat16", halves), ("float16", WEIGHT.astype(np.float16).view(np.uint16))]
    codes, levels = np.empty((2, 16), dtype=np.uint8), np.empty((2, 1, 2), dtype=np.float32)
    of_4_bits = (np.arange(32, dtype=np.float32) % 16 * STEPS - 4).copy()
    assert _native.pack_q4(of_4_bits, codes, levels)
    out = np.empty((3, 2), dtype=np.float32)
    _native.Product(("q4", codes, levels), 2, 32, 1).into(rows, out)
    np.testing.assert_array_equal(out, rows @ of_4_bits.T)
    for weight in [*weights, ("q8", CODES, STEPS)]:
        for threads in (1, 2):
            out = np.empty((3, 2), dtype=np.float32)
            _native.Product(weight, 2, 32, threads).into(rows, out)
            np.testing.assert_array_equal(out, rows @ WEIGHT.T)


def test_weights_of_8_bits_are_found_and_widened() -> None:
    weight = CODES.clip(0, 31) * STEPS
    weight[:, 0] = 127 * STEPS[:, 0]
    codes, steps, out = np.empty_like(CODES), np.empty_like(STEPS), np.empty_like(WEIGHT)
    assert _native.pack_q8(weight, codes, steps)
    _native.widen(("q8", codes, steps), out)
    np.testing.assert_array_equal(out, weight)
    weight[0, 1] += 0.2
    assert not _native.pack_q8(weight, codes, steps)
    with pytest.raises(ValueError, match="weights"):
        _native.widen(("q8", codes, steps), out[:1])
    with pytest.raises(ValueError, match="weights"):
        _native.widen(WEIGHT, out)  # type: ignore[arg-type]  # it is as wide as it gets


@pytest.mark.parametrize(
    "weight",
    [
        None,
        (),
        ("q8",),
        ("q8", CODES),
        ("q8", STEPS, CODES),
        ("q3", CODES, STEPS),
        (8, CODES, STEPS),
        ("bfloat16", CODES),
        WEIGHT.astype(np.float64),
    ],
    ids=str,
)
def test_a_weight_in_no_form_that_is_known_is_refused(weight: Any) -> None:
    with pytest.raises((TypeError, BufferError)):
        _native.Product(weight, 2, 32, 1)


@pytest.mark.parametrize("sizes", [(2, 31), (3, 32), (0, 32), (32, 2), (2**62, 2**62)], ids=str)
def test_a_weight_of_other_sizes_than_it_says_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="weights: not as many"):
        _native.Product(WEIGHT, *sizes, threads=1)


def test_rows_that_do_not_fit_a_product_are_refused() -> None:
    product, out = _native.Product(("q8", CODES, STEPS), 2, 32, 1), np.zeros(2, dtype=np.float32)
    for rows, values in ((31, 2), (32, 1), (64, 2), (0, 1)):
        with pytest.raises(ValueError, match="not as many"):
            product.into(np.zeros(rows, dtype=np.float32), out[:values])
    assert not out.any()


def test_what_would_be_written_while_it_is_read_is_refused() -> None:
    memory = np.ones(128, dtype=np.float32)
    codes, steps = memory.view(np.int8)[:32], memory[40:41]
    packed = memory.view(np.uint8)
    calls: list[Callable[[], object]] = [
        lambda: _native.pack_q4(memory[:32], packed[:16], memory[40:42]),
        lambda: _native.pack_q4(memory[:32], packed[200:216], memory[52:54]),
        lambda: _native.pack_q8(memory[:32], codes, steps),
        lambda: _native.widen(("q8", codes, steps), memory[:32]),
        lambda: _native.widen(("q8", codes, steps), memory[40:72]),
        lambda: _native.Product(memory[:32], 2, 16, 1).into(memory[64:80], memory[20:22]),
        lambda: _native.Product(memory[:32], 2, 16, 1).into(memory[64:80], memory[79:81]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="overlaps"):
            call()
    assert (memory == 1).all()


def test_numbers_are_packed_into_an_array_of_just_as_many() -> None:
    weights, codes, levels = np.ones(64, np.float32), np.empty(32, np.uint8), np.empty(4, np.float32)
    assert _native.pack_q4(weights, codes, levels)
    for others in ((weights[:33], codes, levels), (weights, codes[:16], levels), (weights, codes, levels[:2])):
        with pytest.raises(ValueError, match="codes: not as many"):
            _native.pack_q4(*others)
    with pytest.raises(ValueError, match="codes: not as many"):
        _native.pack_q8(weights, codes.view(np.int8), levels[:2])
