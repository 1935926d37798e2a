"""The dropout of a pass: an extension that its client requires, of values that are checked."""

from __future__ import annotations

import pytest

from llmnode.core.operations import NO_DROPOUT, Dropout
from llmnode.errors import RemoteProtocolError
from llmnode.wire.dropout import dropout_extension, dropout_of
from llmnode.wire.messages import EXTENSIONS, pack, unpack
from llmnode.wire.pass_messages import DROPOUT, Pass

ADAPTER = b"a" * 32
SEEDS = 2**63


def asked(extensions: dict[str, object] | None, adapter: bytes | None = ADAPTER) -> Pass:
    lengths = [4, 9]
    message = Pass(bytes(32), 2, 4, "float32", "raw", "training", lengths, adapter=adapter, extensions=extensions)
    return unpack(Pass, pack(message))


@pytest.mark.parametrize("dropout", [Dropout(0.1, (0, SEEDS - 1)), Dropout(0.0, (5, 5)), NO_DROPOUT], ids=str)
def test_dropout_comes_as_it_was_sent(dropout: Dropout) -> None:
    assert dropout_of(asked(dropout_extension(dropout))) == dropout
    assert DROPOUT in EXTENSIONS[Pass]


@pytest.mark.parametrize(
    "probability", [-0.1, 1.0, 2.0, float("nan"), float("inf"), 0, True, "0.1", None, [0.1]], ids=repr
)
def test_another_probability_is_refused(probability: object) -> None:
    with pytest.raises(RemoteProtocolError, match="dropout"):
        dropout_of(asked({DROPOUT: [probability, [1, 2]]}))


@pytest.mark.parametrize(
    "seeds",
    [[1], [1, 2, 3], [], [1, -1], [1, SEEDS], [1, 2.0], [1, True], [1, None], [[1], 2], 1, "12", None],
    ids=repr,
)
def test_anything_but_a_seed_for_each_sequence_is_refused(seeds: object) -> None:
    with pytest.raises(RemoteProtocolError, match="dropout"):
        dropout_of(asked({DROPOUT: [0.1, seeds]}))


@pytest.mark.parametrize("value", [None, 0.1, [], [0.1], [0.1, [1, 2], 3], {"p": 0.1}], ids=repr)
def test_another_form_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="dropout"):
        dropout_of(asked({DROPOUT: value}))


def test_without_an_adapter_it_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="without an adapter"):
        dropout_of(asked({DROPOUT: [0.1, [1, 2]]}, adapter=None))


def test_parts_of_a_pass_have_the_seeds_of_their_sequences() -> None:
    assert Dropout(0.5, (1, 2, 3)).of_sequences(1, 3) == Dropout(0.5, (2, 3))
    assert not NO_DROPOUT.of_sequences(0, 2)
