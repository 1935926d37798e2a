"""Profiles and precisions: names that are one to one, and a description that crosses to another process."""

from __future__ import annotations

from dataclasses import asdict, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.model import PRECISIONS, ModelInfo, precision_named

MODEL = ModelInfo("org/model", b"m" * 32, blocks=6, hidden_size=4, context_tokens=64)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_model_in_any_precision_crosses_to_another_process_as_it_was(name: str) -> None:
    model = replace(MODEL, precision=PRECISIONS[name], adapter=b"a" * 32)
    assert ModelInfo.from_values(msgpack.unpackb(msgpack.packb(asdict(model)))) == model


@given(st.text(min_size=1, max_size=40) | st.sampled_from(sorted(PRECISIONS)))
def test_a_precision_is_the_one_of_its_name_and_known_or_not(name: str) -> None:
    read = precision_named(name)
    assert (read.name, read.is_known, read in PRECISIONS.values()) == (name, name in PRECISIONS, name in PRECISIONS)


def test_profiles_differ_by_model_precision_and_adapter() -> None:
    others = [
        replace(MODEL, digest=b"n" * 32),
        replace(MODEL, precision=PRECISIONS["float32+int8"]),
        replace(MODEL, adapter=b"a" * 32),
    ]
    assert len({each.profile for each in [MODEL, *others]}) == 4
    assert replace(MODEL, name="another", blocks=7).profile == MODEL.profile
