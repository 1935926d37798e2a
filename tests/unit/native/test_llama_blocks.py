"""The blocks of the Rust extension as Python sees them: which weights and sequences they take, what they refuse."""

from typing import Any, TypeAlias

import numpy as np
import pytest

from llmnode import _native
from unit.blocks_of_ones import llama, llama_block, slabs

NO_UPDATES: Any = {"qkv": [], "output": [], "gate_up": [], "down": []}

Buffer: TypeAlias = Any  # whatever has, or lacks, the buffer protocol: before Python 3.12 that has no type


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
        with pytest.raises(ValueError, match=r"fit into its cache|as many values|not here"):
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
        whole.flags.writeable = False
        with pytest.raises(BufferError, match="read-only"):
            _native.SequenceSlabs([(whole, np.zeros((1, 4, 16), np.float32))], 4)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_an_adapter_of_ones_adds_up_in_the_pieces_that_have_it() -> None:
    """A state of ones gives 16 to each of three ranks, so the values of attention get 2 * 3 * 16 more."""
    blocks, state = llama(llama_block()), ones(16).tobytes()
    adapter = _native.LlamaAdapter([{**NO_UPDATES, "qkv": [(32, ones(3, 16), ones(3, 16), 2.0)]}])
    plain, with_it = blocks.forward(0, 1, [(slabs(), 0, 0, state), (slabs(), 0, 0, state)], [None, adapter])
    assert blocks.forward(0, 1, [(slabs(), 0, 0, state)]) == [plain]
    gated = 16 * 16 * 16  # of a state that is normed to ones again
    np.testing.assert_allclose(np.frombuffer(with_it, np.float32), 1 + 16 * (16 + 2 * 3 * 16) + gated, rtol=1e-5)


@pytest.mark.parametrize(
    ("updates", "error"),
    [
        ([], ValueError),
        ([NO_UPDATES, NO_UPDATES], ValueError),
        ([{**NO_UPDATES, "qkv": [(33, ones(3, 16), ones(3, 16), 2.0)]}], ValueError),
        ([{**NO_UPDATES, "down": [(0, ones(3, 15), ones(3, 16), 2.0)]}], ValueError),
        ([{**NO_UPDATES, "down": [(0, ones(0, 16), ones(0, 16), 2.0)]}], ValueError),
        ([{**NO_UPDATES, "output": [(0, ones(3, 16), ones(3, 8), 2.0)]}], ValueError),
        ([{"qkv": []}], KeyError),
        ([{**NO_UPDATES, "down": [(-1, ones(3, 16), ones(3, 16), 2.0)]}], TypeError),
        ([{**NO_UPDATES, "down": [(0, np.ones((3, 16)), ones(3, 16), 2.0)]}], TypeError),
        ([{**NO_UPDATES, "down": [(0, ones(16, 3).T, ones(3, 16), 2.0)]}], TypeError),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(updates: Any, error: type[Exception]) -> None:
    state = ones(16).tobytes()
    with pytest.raises(error):
        llama(llama_block()).forward(0, 1, [(slabs(), 0, 0, state)], [_native.LlamaAdapter(updates)])


def test_adapters_of_another_number_of_pieces_are_refused() -> None:
    adapter, state = _native.LlamaAdapter([NO_UPDATES]), ones(16).tobytes()
    for adapters in ([], [adapter, None]):
        with pytest.raises(ValueError, match="another number"):
            llama(llama_block()).forward(0, 1, [(slabs(), 0, 0, state)], adapters)
