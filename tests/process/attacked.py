"""A server that is attacked, how it is asked what it still holds, and whether it still serves exactly."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from llmnode.core.policy import LinkPolicy
from llmnode.core.span import Span
from llmnode.models.open_model import open_model
from llmnode.net.host import open_network
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Description, unpack
from process.small_server import SmallServer, connected, expected_tokens, serve_small
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from llmnode.models.sources.folder import ModelFolder

KV_TOKENS = 400
CONTEXT = 1000
SETTLE_S = 80.0
"""trio keeps a thread that nobody uses for 10 s, and a server what was leased for 60 s."""
ANSWER_S = 30.0
NEW_TOKENS = 12
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1] * 20]


@dataclass(frozen=True)
class Served:
    """The server, and what it should answer."""

    server: SmallServer
    folder: ModelFolder
    model: Any  # as transformers types it

    @property
    def address(self) -> str:
        return self.server.address

    async def check_serves_exactly(self) -> None:
        """Sessions of unequal length at once, each with the tokens of transformers on the whole model."""
        async with connected([self.address], self.folder) as client:
            chosen = await client.generate(PROMPTS, NEW_TOKENS)
        assert chosen == [expected_tokens(self.model, prompt, NEW_TOKENS) for prompt in PROMPTS]


@contextmanager
def serve_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that only one module of tests uses, since they attack it."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model") / "small"
    model = make_model("llama", tied=False, max_position_embeddings=CONTEXT)
    model.save_pretrained(path)
    errors = tmp_path_factory.mktemp("said") / "stderr"
    with serve_small(path, Span(0, BLOCKS), KV_TOKENS, errors) as server:
        yield Served(server, open_model(str(path)), model)


async def describe(address: str) -> Description:
    """Asks the server for its description over a new connection."""
    async with open_network([], LinkPolicy()) as network:
        with trio.fail_after(ANSWER_S):
            link = await network.dial(address)
            await link.send(Frame(FrameType.DESCRIBE))
            while (frame := await link.receive()).type is not FrameType.DESCRIPTION:
                pass
        return unpack(Description, frame.meta)


async def kv_is_free(address: str) -> bool:
    return (await describe(address)).kv_tokens_free == KV_TOKENS


async def until(holds: Callable[[], Awaitable[bool]], what: str | Callable[[], str]) -> None:
    with trio.move_on_after(SETTLE_S):
        while not await holds():  # noqa: ASYNC110 - another process has no event for us
            await trio.sleep(0.1)
        return
    pytest.fail(f"not in {SETTLE_S:g} s: {what if isinstance(what, str) else what()}")
