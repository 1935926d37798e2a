"""How a command reaches a model: what `add_swarm` asks for, and the connection made of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.compute.startup import collection_paused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from llmnode.client.causal_lm import DistributedModelForCausalLM


@dataclass(frozen=True, slots=True)
class Access:
    """See `llmnode.connect`; without a `model` it is the embedded one."""

    model: str | None
    peers: Sequence[str]
    swarm_key: str | None
    codec: str
    dtype: str
    spot_check: float
    relayed_prefill: str

    def connect(self) -> AbstractContextManager[DistributedModelForCausalLM]:
        """Open until the context ends; what takes long is told on stderr. Raises ConfigError, PeerError or NoRoute."""
        with collection_paused():
            from llmnode.client.model import connect
            from llmnode.models.cores import use_threads
        use_threads()
        return connect(
            self.model,
            peers=self.peers,
            swarm_key=self.swarm_key,
            codec=self.codec,
            dtype=self.dtype,
            spot_check=self.spot_check,
            relayed_prefill=self.relayed_prefill,
            report=lambda line: print(f"llmnode: {line}", file=sys.stderr),
        )
