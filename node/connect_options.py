"""How a command reaches a model: from the options of `add_swarm` to a client."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmnode.machine.startup import collection_paused
from llmnode.node.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import GenerationConfig

    from llmnode.client.connect import Client
    from llmnode.client.portal import Portal
    from llmnode.core.model import PrecisionWish
    from llmnode.core.policy import RoutePolicy
    from llmnode.net.invite import Invite


class OpenClient(NamedTuple):
    """A client in an event loop of its own, and the way into that. The command itself has the main thread.

    So neither output nor a user who types holds up a link, and Ctrl-C reaches the command.
    """

    portal: Portal
    client: Client


@dataclass(frozen=True, slots=True)
class Access:
    """See `llmnode.connect`; without a `model` it is the embedded one."""

    model: str | None
    way_in: Invite
    codec: str
    precision: PrecisionWish
    route: RoutePolicy
    spot_check: float
    relayed_prefill: str
    adapter: str | None = None

    def generation_config(self) -> GenerationConfig:
        """The model's, from its own files. Raises ConfigError or ModelError."""
        from llmnode.models.generation_config import generation_config
        from llmnode.models.open_model import open_model

        return generation_config(open_model(self.model, say))

    @contextmanager
    def open(self) -> Iterator[OpenClient]:
        """Open until the context ends. Slow steps are told on stderr. Raises ConfigError, PeerError or NoRoute."""
        with collection_paused():
            from llmnode.client.connect import aconnect, load_parts
            from llmnode.client.portal import open_portal
            from llmnode.core.policy import ClientPolicy, RelayedPolicy, SpotCheckPolicy
            from llmnode.machine.threads import use_threads
            from llmnode.models.open_model import open_model
            from llmnode.models.peft_folder import downloaded
        use_threads()
        checks, relayed = SpotCheckPolicy(self.spot_check), RelayedPolicy(prefill=self.relayed_prefill)
        policy = ClientPolicy(route=self.route, spot_checks=checks, relayed=relayed)
        parts = load_parts(open_model(self.model, say))
        adapter = self.adapter and downloaded(self.adapter, say)
        connecting = aconnect(
            self.way_in, parts=parts, codec=self.codec, dtype=self.precision, adapter=adapter, policy=policy
        )
        with open_portal() as portal, portal.enter(connecting) as client:
            yield OpenClient(portal, client)
