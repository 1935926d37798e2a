"""How a command reaches a model: what `add_swarm` asks for, and the connection made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.machine.startup import collection_paused
from llmnode.node.terminal import say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from transformers import GenerationConfig

    from llmnode.client.causal_lm import DistributedModelForCausalLM


@dataclass(frozen=True, slots=True)
class Access:
    """See `llmnode.connect`; without a `model` it is the embedded one."""

    model: str | None
    peers: Sequence[str]
    swarm_key: str | Path | None
    codec: str
    dtype: str
    spot_check: float
    relayed_prefill: str

    def generation_config(self) -> GenerationConfig:
        """The model's, from its own files. Raises ConfigError or ModelError."""
        from transformers import GenerationConfig

        from llmnode.models.sources.open_model import open_model

        folder = open_model(self.model, say).path
        if not (folder / "generation_config.json").exists():
            return GenerationConfig()
        return GenerationConfig.from_pretrained(folder, local_files_only=True)

    def connect(self) -> AbstractContextManager[DistributedModelForCausalLM]:
        """Open until the context ends; what takes long is told on stderr. Raises ConfigError, PeerError or NoRoute."""
        with collection_paused():
            from llmnode.client.model import connect
            from llmnode.machine.threads import use_threads
        use_threads()
        return connect(
            self.model,
            peers=self.peers,
            swarm_key=self.swarm_key,
            codec=self.codec,
            dtype=self.dtype,
            spot_check=self.spot_check,
            relayed_prefill=self.relayed_prefill,
            report=say,
        )
