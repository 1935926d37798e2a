"""Training is refused before anything is loaded or joined if it cannot be repeated to the bit as it is to be."""

from __future__ import annotations

import pytest

import llmnode
from llmnode.core.policy import ClientPolicy
from llmnode.errors import ConfigError
from unit.in_trio import in_trio


@in_trio
async def test_a_client_that_is_to_train_repeatably_is_refused_a_lossy_codec() -> None:
    with pytest.raises(ConfigError, match="choose the codec raw"):
        async with llmnode.aconnect("no address", codec="fp16", policy=ClientPolicy(deterministic=True)):
            pass
    with pytest.raises(ConfigError, match="no address"):
        async with llmnode.aconnect("no address", codec="raw", policy=ClientPolicy(deterministic=True)):
            pass
