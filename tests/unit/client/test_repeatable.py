"""Training is refused before anything is loaded or joined if it cannot be repeated to the bit as it is to be."""

from __future__ import annotations

import pytest

import llmnode
from llmnode import petals
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


ABSENT = "/no/such/model"
PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"


@pytest.mark.parametrize("peers", [PEER, None])
def test_it_is_refused_before_a_model_is_opened_or_peers_are_looked_for(peers: str | None) -> None:
    with pytest.raises(ConfigError, match="choose the codec raw"):
        llmnode.connect(ABSENT, peers=peers, codec="fp16", deterministic=True)
    with pytest.raises(ConfigError, match="there is no codec 'fp8'"):
        llmnode.connect(ABSENT, peers=peers, codec="fp8")
    with pytest.raises(ConfigError, match="there is no codec 'fp8'"):
        petals.AutoDistributedModelForCausalLM.from_pretrained(ABSENT, initial_peers=[PEER], codec="fp8")
