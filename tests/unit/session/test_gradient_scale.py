"""Gradients are sent with numbers of the size that a lossy codec carries best, and come back as they are."""

from __future__ import annotations

import numpy as np
import pytest

from llmnode.errors import PeerRefused
from llmnode.session.gradient_scale import UNSCALED, scales_of
from llmnode.session.pass_answer import PassAnswer
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden

LOSSY = [codec for codec in Codec if codec is not Codec.RAW]
DRAWN = np.random.default_rng(1).standard_normal(640).astype("<f4")
SIZES = [2.0**exponent for exponent in range(-110, 101, 10)]


def answer_of(rows: np.ndarray) -> PassAnswer:
    return PassAnswer(rows.tobytes(), rows[:5].copy(), rows[5:7].copy())


@pytest.mark.parametrize("codec", LOSSY)
def test_gradients_of_every_size_are_sent_alike_and_come_back_to_the_bit(codec: Codec) -> None:
    sent = set()
    for size in SIZES:
        gradient = (DRAWN * size).astype("<f4")
        first, second = scales_of(gradient.tobytes(), codec)
        scaled = np.frombuffer(first.up(gradient.tobytes()), "<f4")
        assert 0.25 <= np.abs(scaled).max() < 0.5
        sent.add(scaled.tobytes())
        assert np.array_equal(np.frombuffer(second.up(gradient.tobytes()), "<f4"), scaled / 64)
        for scale in (first, second):
            back = scale.down(answer_of(np.frombuffer(scale.up(gradient.tobytes()), "<f4")))
            assert bytes(back.rows) == gradient.tobytes()
            assert np.array_equal(back.of_adapter, gradient[:5])
            assert np.array_equal(back.of_prompts, gradient[5:7])
    assert len(sent) == 1


@pytest.mark.parametrize("codec", LOSSY)
def test_no_gradient_is_too_small_or_too_large_to_be_sent(codec: Codec) -> None:
    form = HiddenForm(DRAWN.size, codec)
    for size in (1e-45, 1e-38, 1e-12, 3e38):
        gradient = np.clip(DRAWN, -1, 1) * np.float32(size)
        for scale in scales_of(gradient.tobytes(), codec):
            payload = form.encode(scale.up(gradient.tobytes()))
            assert form.is_sound(payload, 1)
            back = scale.down(answer_of(np.frombuffer(decode_hidden(payload, codec, DRAWN.size), "<f4")))
            found, wide = np.frombuffer(back.rows, "<f4").astype(float), gradient.astype(float)
            assert np.linalg.norm(found - wide) <= 0.03 * np.linalg.norm(wide)


def test_raw_and_zeros_go_as_they_are() -> None:
    for gradient, codec in ((DRAWN * np.float32(1e-9), Codec.RAW), (0 * DRAWN, Codec.RAW), (0 * DRAWN, Codec.FP16)):
        given, answer = gradient.tobytes(), answer_of(gradient)
        assert scales_of(given, codec) == [UNSCALED]
        assert UNSCALED.up(given) is given
        assert UNSCALED.down(answer) is answer


def test_an_answer_that_overflows_when_it_is_not_scaled_any_more_is_a_refusal() -> None:
    (scale, _) = scales_of((DRAWN * np.float32(2**100)).tobytes(), Codec.BF16)
    with pytest.raises(PeerRefused, match="not finite") as refused:
        scale.down(answer_of(DRAWN * np.float32(2**40)))
    assert refused.value.code == "overflow"
