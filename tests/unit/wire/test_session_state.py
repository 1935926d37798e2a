"""A client compares the terms of two sessions before it asks any hop for a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmnode.core.model import ModelInfo
from llmnode.core.operations import DeepPrompts
from llmnode.core.policy import ClientPolicy
from llmnode.errors import LocalProtocolError
from llmnode.wire.hop_state import HopState
from llmnode.wire.payload import Codec
from llmnode.wire.session_state import SessionState
from llmnode.wire.session_terms import SessionTerms

MODEL = ModelInfo("exact", b"d" * 32, blocks=1, hidden_size=1, context_tokens=100)
TERMS = SessionTerms(MODEL, 24, Codec.RAW, ClientPolicy(), prompts=DeepPrompts(1, 1, 1, bytes(4)))


@pytest.mark.parametrize(
    "other",
    [
        {"model": replace(MODEL, adapter=b"a" * 32)},
        {"codec": Codec.BF16},
        {"prompts": DeepPrompts(1, 1, 1, b"\x01" * 4)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_no_session_becomes_a_copy_of_one_on_other_terms(other: dict[str, Any]) -> None:
    source: SessionState[HopState] = SessionState(replace(TERMS, **other))
    copy: SessionState[HopState] = SessionState(TERMS)
    with pytest.raises(LocalProtocolError, match="no copy"):
        copy.shared_with(source, [])
