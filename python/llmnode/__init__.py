"""llmnode: run language models together. Importing it loads neither torch nor libp2p; names load what they need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.client.causal_lm import DistributedModelForCausalLM as DistributedModelForCausalLM
    from llmnode.client.connect import Client as Client
    from llmnode.client.connect import aconnect as aconnect
    from llmnode.client.connect import aresume as aresume
    from llmnode.client.model import AutoDistributedModelForCausalLM as AutoDistributedModelForCausalLM
    from llmnode.client.model import connect as connect
    from llmnode.client.model import resume as resume
    from llmnode.client.sampling import Sampling as Sampling
    from llmnode.session.session import InferenceSession as InferenceSession

_HOMES = {
    "AutoDistributedModelForCausalLM": "llmnode.client.model",
    "Client": "llmnode.client.connect",
    "DistributedModelForCausalLM": "llmnode.client.causal_lm",
    "InferenceSession": "llmnode.session.session",
    "Sampling": "llmnode.client.sampling",
    "aconnect": "llmnode.client.connect",
    "aresume": "llmnode.client.connect",
    "connect": "llmnode.client.model",
    "resume": "llmnode.client.model",
}

__all__ = [
    "AutoDistributedModelForCausalLM",
    "Client",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "Sampling",
    "aconnect",
    "aresume",
    "connect",
    "resume",
]


def __getattr__(name: str) -> object:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module 'llmnode' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
