"""llmnode: run language models together. Importing it loads neither torch nor libp2p; names load what they need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.client.causal_lm import DistributedModelForCausalLM as DistributedModelForCausalLM
    from llmnode.client.connect import Client as Client
    from llmnode.client.connect import ClientParts as ClientParts
    from llmnode.client.connect import aconnect as aconnect
    from llmnode.client.connect import aresume as aresume
    from llmnode.client.connect import load_parts as load_parts
    from llmnode.client.generate import Answer as Answer
    from llmnode.client.generate import Finish as Finish
    from llmnode.client.generate import Generation as Generation
    from llmnode.client.generate import Token as Token
    from llmnode.client.generate import TokenTiming as TokenTiming
    from llmnode.client.generate import Usage as Usage
    from llmnode.client.model import connect as connect
    from llmnode.client.model import resume as resume
    from llmnode.client.sampling import Sampling as Sampling
    from llmnode.client.stopping import FinishReason as FinishReason
    from llmnode.core.policy import ClientPolicy as ClientPolicy
    from llmnode.core.policy import LinkPolicy as LinkPolicy
    from llmnode.petals import AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM
    from llmnode.session.session import InferenceSession as InferenceSession

_HOMES = {
    "Answer": "llmnode.client.generate",
    "AutoDistributedModelForCausalLM": "llmnode.petals",
    "Client": "llmnode.client.connect",
    "ClientParts": "llmnode.client.connect",
    "ClientPolicy": "llmnode.core.policy",
    "DistributedModelForCausalLM": "llmnode.client.causal_lm",
    "Finish": "llmnode.client.generate",
    "FinishReason": "llmnode.client.stopping",
    "Generation": "llmnode.client.generate",
    "InferenceSession": "llmnode.session.session",
    "LinkPolicy": "llmnode.core.policy",
    "Sampling": "llmnode.client.sampling",
    "Token": "llmnode.client.generate",
    "TokenTiming": "llmnode.client.generate",
    "Usage": "llmnode.client.generate",
    "aconnect": "llmnode.client.connect",
    "aresume": "llmnode.client.connect",
    "connect": "llmnode.client.model",
    "load_parts": "llmnode.client.connect",
    "resume": "llmnode.client.model",
}

__all__ = [
    "Answer",
    "AutoDistributedModelForCausalLM",
    "Client",
    "ClientParts",
    "ClientPolicy",
    "DistributedModelForCausalLM",
    "Finish",
    "FinishReason",
    "Generation",
    "InferenceSession",
    "LinkPolicy",
    "Sampling",
    "Token",
    "TokenTiming",
    "Usage",
    "aconnect",
    "aresume",
    "connect",
    "load_parts",
    "resume",
]


def __getattr__(name: str) -> object:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'llmnode' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
