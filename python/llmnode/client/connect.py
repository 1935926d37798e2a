"""From a list of peers to a client that can generate."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.client.connection import Connection, open_connection
from llmnode.client.generate import Generation, check_length, generate_greedy
from llmnode.client.session import InferenceSession, open_session
from llmnode.compute.worker import ComputeThread
from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.core.route import Hop, Route, find_route
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerRefused, single_error
from llmnode.models.embedded import open_embedded
from llmnode.models.parts import load_ends
from llmnode.models.tokenizer import load_tokenizer
from llmnode.net.host import open_network, parse_peer
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.models.folder import ModelFolder
    from llmnode.models.parts import Ends
    from llmnode.models.tokenizer import Tokenizer
    from llmnode.ports import Network
    from llmnode.wire.messages import Description


@dataclass(frozen=True, slots=True)
class ClientParts:
    """What a client reads from disk: the ends and the tokenizer, no block."""

    model: ModelInfo
    ends: Ends
    tokenizer: Tokenizer


class Client:
    """A model whose blocks are elsewhere. Made by `aconnect`."""

    def __init__(
        self,
        parts: ClientParts,
        route: Route,
        connections: Mapping[PeerId, Connection],
        codec: Codec,
        policy: ClientPolicy,
    ) -> None:
        self.model = parts.model
        self.tokenizer = parts.tokenizer
        self.route = route
        self._ends = parts.ends
        self._connections = connections
        self.codec = codec
        self.policy = policy
        self._thread = ComputeThread()

    def inference_session(self, max_length: int) -> AbstractAsyncContextManager[InferenceSession]:
        """A session with KV for `max_length` positions: `async with client.inference_session(64) as session`."""
        return open_session(self.route, self._connections, self.model, max_length, self.codec, self.policy)

    async def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        on_token: Callable[[int], None] = lambda _token: None,
        stop_at_eos: bool = True,
    ) -> Generation:
        """Greedy tokens after the token ids `prompt`; `on_token` sees each as it is chosen.

        Raises ConfigError if they do not fit the model's context, PeerError or SessionLost if the swarm fails.
        """
        max_length = check_length(len(prompt), max_new_tokens, self.model)
        async with self.inference_session(max_length) as session:
            return await generate_greedy(
                session,
                self._ends,
                self._thread,
                prompt,
                max_new_tokens,
                stop_token_id=self.tokenizer.eos_token_id if stop_at_eos else None,
                chunk_tokens=self.policy.chunk_tokens,
                on_token=on_token,
            )


def load_parts(folder: ModelFolder | None = None) -> ClientParts:
    """Read the ends and the tokenizer of the model in `folder`, by default the embedded one. Blocks for seconds."""
    folder = folder or open_embedded()
    return ClientParts(folder.info, load_ends(folder), load_tokenizer(folder))


@asynccontextmanager
async def aconnect(
    peers: Sequence[str],
    *,
    parts: ClientParts | None = None,
    codec: str = "raw",
    link_policy: LinkPolicy | None = None,
    policy: ClientPolicy | None = None,
) -> AsyncIterator[Client]:
    """Connect to the servers at the multiaddrs `peers`, which together must hold every block.

    `parts` come from `load_parts`, and are those of the embedded model by default. `codec` is how hidden states cross
    the wire: "raw" is exact; "fp16", "bf16" and "int8" are lossy and smaller. Raises ConfigError (an address),
    PeerError (a peer that cannot be reached or holds another model) or NoRoute (blocks that nobody holds).
    """
    policy = policy or ClientPolicy()
    if codec not in list(Codec):
        raise ConfigError(f"there is no codec {codec!r}: choose one of {', '.join(Codec)}")
    for address in peers:
        parse_peer(address)  # a typing error is told before the seconds that loading takes
    if parts is None:
        # Abandoned: the first run converts the model, and Ctrl-C must not wait for that.
        parts = await trio.to_thread.run_sync(load_parts, abandon_on_cancel=True)
    with single_error():
        async with open_network([], link_policy or LinkPolicy()) as network, AsyncExitStack() as stack:
            connections: dict[PeerId, Connection] = {}
            held: list[Hop] = []
            for address in dict.fromkeys(peers):  # each once: a peer takes few links from one client
                connection = await stack.enter_async_context(_connected(network, address))
                connections[connection.peer] = connection
                description = await connection.describe(policy.open_timeout_s)
                held.append(_checked_hop(connection.peer, description, parts.model))
            yield Client(parts, find_route(parts.model.blocks, held), connections, Codec(codec), policy)


@asynccontextmanager
async def _connected(network: Network, address: str) -> AsyncIterator[Connection]:
    link = await network.dial(address)
    async with open_connection(link) as connection:
        yield connection


def _checked_hop(peer: PeerId, description: Description, model: ModelInfo) -> Hop:
    if description.model_digest != model.digest:
        raise PeerRefused(
            RefusalCode.WRONG_MODEL, f"it serves {description.model}, of other weights than our {model.name}", peer=peer
        )
    return Hop(peer, Span(description.span_start, description.span_end))
