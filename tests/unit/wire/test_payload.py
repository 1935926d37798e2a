"""Hidden states as bytes: sizes are checked, raw is exact, and lossy codecs stay within their bounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llmnode import _native
from llmnode.errors import ConfigError, RemoteProtocolError
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.payload import Codec, HiddenForm, encode_hidden, payload_bytes

codecs = st.sampled_from(list(Codec))
hidden_sizes = st.integers(1, 200)
lengths = st.integers(1, 8)
ordinary = st.floats(-60_000, 60_000, width=32)
SMALLEST_NORMAL = 2.0**-14
"""Below this value fp16 rounds with a fixed step."""


def hidden_of(length: int, form: HiddenForm, payload: bytes) -> Frame:
    return Frame(FrameType.STEP, length=length, payload=payload)


@given(hidden_sizes, codecs, lengths)
def test_hidden_states_of_every_position_pass(hidden_size: int, codec: Codec, length: int) -> None:
    form = HiddenForm(hidden_size, codec)
    payload = bytes(form.encode(np.zeros(length * hidden_size, dtype="<f4").data.cast("B")))
    assert len(payload) == payload_bytes(codec, length * hidden_size)
    form.check(hidden_of(length, form, payload))


@given(hidden_sizes, codecs, lengths, st.integers(0, 5000))
def test_a_payload_of_any_other_size_is_refused(hidden_size: int, codec: Codec, length: int, size: int) -> None:
    form = HiddenForm(hidden_size, codec)
    assume(size != payload_bytes(codec, length * hidden_size))
    with pytest.raises(RemoteProtocolError, match=f"STEP: {size} bytes for {length} positions"):
        form.check(hidden_of(length, form, bytes(size)))


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("payload", [b"", bytes(4)])
def test_hidden_states_of_no_position_are_refused(codec: Codec, payload: bytes) -> None:
    form = HiddenForm(1, codec)
    with pytest.raises(RemoteProtocolError, match="for 0 positions"):
        form.check(hidden_of(0, form, payload))


@pytest.mark.parametrize("codec", list(Codec))
def test_the_largest_length_that_a_header_can_tell_is_just_another_wrong_one(codec: Codec) -> None:
    form = HiddenForm(2**17, codec)
    with pytest.raises(RemoteProtocolError):
        form.check(hidden_of(2**32 - 1, form, bytes(64)))


@given(arrays.arrays("<f4", st.integers(1, 400), elements=ordinary), codecs)
def test_what_arrives_is_what_was_sent_within_the_codec_s_bounds(values: np.ndarray, codec: Codec) -> None:
    form = HiddenForm(len(values), codec)
    payload = bytes(form.encode(values.data.cast("B")))
    arrived = np.frombuffer(form.decode(hidden_of(1, form, payload)), dtype="<f4")
    error = np.abs(arrived.astype("f8") - values)
    match codec:
        case Codec.RAW:
            assert arrived.tobytes() == values.tobytes()
        case Codec.FP16:
            assert (error <= np.maximum(np.abs(values), SMALLEST_NORMAL) * 2.0**-11).all()
        case Codec.BF16:
            assert (error <= np.abs(values) * 2.0**-8 + 1e-40).all()
        case Codec.INT8:
            assert error.max() <= np.abs(values).max() * 0.036  # half the dynamic map's widest gap


@given(arrays.arrays("<u4", st.integers(1, 300), elements=st.integers(0, 2**32 - 1)))
def test_bf16_rounds_as_torch_does(bits: np.ndarray) -> None:
    values = bits.view("<f4")
    form = HiddenForm(len(values), Codec.BF16)
    ours = np.frombuffer(form.encode(values.data.cast("B")), dtype="<u2")
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view("<u2")
    is_nan = np.isnan(values)
    assert (ours[~is_nan] == theirs[~is_nan]).all()
    decoded = np.frombuffer(form.decode(hidden_of(1, form, ours.tobytes())), dtype="<f4")
    assert np.isnan(decoded[is_nan]).all()


@pytest.mark.parametrize(
    ("codec", "value"),
    [(Codec.FP16, 70_000), (Codec.FP16, float("nan")), (Codec.INT8, float("inf")), (Codec.INT8, float("nan"))],
)
def test_what_a_codec_cannot_carry_names_another_one(codec: Codec, value: float) -> None:
    with pytest.raises(ConfigError, match="choose --codec"):
        HiddenForm(2, codec).encode(np.array([1, value], dtype="<f4").data.cast("B"))


EDGES = [
    0.0,
    65504.0,
    np.nextafter(np.float32(65504), np.float32(1e9)),
    65519.0,
    2.0**56,
    2.0**56 * 1.001,
    np.inf,
    np.nan,
]


@pytest.mark.parametrize("codec", Codec)
@given(st.floats(width=32))
def test_a_codec_can_carry_what_is_sound_before_and_after_it_is_encoded(codec: Codec, drawn: float) -> None:
    form = HiddenForm(64, codec)
    for value in (drawn, *EDGES, *(-each for each in EDGES)):
        hidden = np.array([1] * 63 + [value], "<f4").tobytes()
        try:
            is_sound = HiddenForm(64, Codec.RAW).is_sound(hidden, 1) and form.is_sound(form.encode(hidden), 1)
        except ConfigError:
            is_sound = False
        assert form.can_carry(hidden) == is_sound, value


@given(st.binary(min_size=68, max_size=68))
def test_any_int8_bytes_are_finite_values_or_refused(payload: bytes) -> None:
    form = HiddenForm(64, Codec.INT8)
    assert _native.quantized_bytes(64) == len(payload)
    try:
        decoded = form.decode(hidden_of(1, form, payload))
    except RemoteProtocolError:
        return
    assert np.isfinite(np.frombuffer(decoded, dtype="<f4")).all()


def values_of(form: HiddenForm, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(length * form.hidden_size).astype("<f4")


def is_exact(form: HiddenForm) -> bool:
    """Whether payloads can be cut and joined as they are."""
    return form.codec is not Codec.INT8 or form.hidden_size % 64 == 0


sizes = st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192]))
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(sizes, codecs, cuts)
def test_the_join_of_cuts_is_the_payload_again(hidden_size: int, codec: Codec, lengths: list[int]) -> None:
    form = HiddenForm(hidden_size, codec)
    values = values_of(form, sum(lengths), 1)
    rows = values.reshape(-1, hidden_size)
    edges = np.cumsum([0, *lengths])
    pieces = [(form.encode(rows[start:end].tobytes()), end - start) for start, end in pairwise(edges.tolist())]
    joined = form.join(pieces)
    frame = hidden_of(sum(lengths), form, bytes(joined))
    form.check(frame)
    if is_exact(form):
        assert bytes(joined) == bytes(form.encode(values.tobytes()))
    else:  # it is quantized twice
        error = np.abs(np.frombuffer(form.decode(frame), "<f4") - values)
        assert error.max() <= np.abs(values).max() * 2 * 0.037


@given(sizes, codecs, st.integers(1, 6), st.integers(1, 6))
def test_the_first_of_a_join_is_what_was_joined_first(hidden_size: int, codec: Codec, one: int, other: int) -> None:
    form = HiddenForm(hidden_size, codec)
    hidden, rest = values_of(form, one, 1), values_of(form, other, 2)
    payload = form.encode(hidden.tobytes())
    joined = form.join([(payload, one), (form.encode(rest.tobytes()), other)])
    first = bytes(form.cut((joined, one + other), 0, one))
    frame = hidden_of(one, form, first)
    form.check(frame)
    if is_exact(form):
        assert first == bytes(payload)
    else:  # it is quantized three times
        error = np.abs(np.frombuffer(form.decode(frame), "<f4") - hidden)
        assert error.max() <= max(np.abs(hidden).max(), np.abs(rest).max()) * 3 * 0.038


@given(sizes, codecs, st.integers(1, 6))
def test_one_piece_is_joined_without_a_change(hidden_size: int, codec: Codec, length: int) -> None:
    form = HiddenForm(hidden_size, codec)
    payload = bytes(form.encode(values_of(form, length, 1).tobytes()))
    assert form.join([(payload, length)]) == payload


LARGEST = {Codec.RAW: 2.0**56, Codec.BF16: 2.0**56, Codec.FP16: 65504.0}
SPOILT = [np.nan, -np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("codec", list(LARGEST))
@given(at=st.integers(0, 63), bad=st.sampled_from(SPOILT))
def test_hidden_states_that_are_no_numbers_are_refused(codec: Codec, at: int, bad: float) -> None:
    form = HiddenForm(8, codec)
    bits = np.zeros(64, "<f4")
    frame = hidden_of(8, form, _as_codec(bits, codec))
    form.check_values(frame)
    bits[at] = bad
    with pytest.raises(RemoteProtocolError, match="STEP: hidden states that are no numbers"):
        form.check_values(hidden_of(8, form, _as_codec(bits, codec)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("codec", list(LARGEST))
def test_hidden_states_may_be_as_large_as_blocks_can_compute_with(codec: Codec, sign: float) -> None:
    form, largest = HiddenForm(1, codec), sign * LARGEST[codec]
    assert form.is_sound(_as_codec(np.array([largest], "<f4"), codec), 1)
    if codec is not Codec.FP16:  # which has no larger numbers
        assert not form.is_sound(_as_codec(np.array([largest * 1.01], "<f4"), codec), 1)


@given(scale=st.sampled_from([*SPOILT, -1.0, 2.0**57]), block=st.integers(0, 2))
def test_int8_that_stands_for_no_numbers_is_refused(scale: float, block: int) -> None:
    form = HiddenForm(192, Codec.INT8)
    payload = bytearray(form.encode(np.ones(192, "<f4").data.cast("B")))
    assert form.is_sound(payload, 1)
    payload[4 * block : 4 * block + 4] = np.array([scale], "<f4").tobytes()
    assert not form.is_sound(payload, 1)


def _as_codec(values: np.ndarray, codec: Codec) -> bytes:
    """In the codec, whatever the values are: an encoder would refuse some of them."""
    match codec:
        case Codec.RAW:
            return values.tobytes()
        case Codec.FP16:
            return values.astype("<f2").tobytes()
        case _:
            return (
                values.view("<u2")[1::2].tobytes()
                if np.isnan(values).any()
                else bytes(encode_hidden(values.data.cast("B"), codec))
            )
