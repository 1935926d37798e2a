"""A client that needs no swarm: its model says the same few tokens, whatever it is asked."""

from __future__ import annotations

import signal
import threading
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
import trio
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from llmnode.client.connect import Client, ClientParts
from llmnode.client.portal import open_portal
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy
from llmnode.core.traffic import Traffic
from llmnode.errors import ConfigError, PeerUnreachable, SessionLost
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.models.text.tokenizer import load_tokenizer
from llmnode.node.connect_options import OpenClient
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from llmnode.client.generate import Answer
    from llmnode.models.text.tokenizer import Tokenizer
    from llmnode.wire.frame import Buffer

CONTEXT_TOKENS = 64
END = 0
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
FAIL, INTERRUPT, REFUSED = "fail!", "stop!", "refused!"
"""Words of a prompt that have an answer go wrong in the middle."""
GONE = "it is gone: \x1b]52;c;eA==\x07\u202e\nllmnode: ready"
"""The words of the peer that fails, which is hostile."""


def canned_tokenizer(folder: Path) -> Tokenizer:
    """A token a byte, and the end. It is saved in `folder`."""
    made = tokenizers.Tokenizer(
        models.BPE({"<end>": END, **{char: 1 + at for at, char in enumerate(sorted(ALPHABET))}}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=template).save_pretrained(folder)
    as_folder: Any = SimpleNamespace(path=folder, name="canned")
    return load_tokenizer(as_folder)


VOCABULARY = 1 + len(ALPHABET)


class CannedEnds:
    """A hidden state is the id of a token: as it goes in, and of the token that comes next as it comes out."""

    vocabulary = VOCABULARY

    def __init__(self) -> None:
        self.scored: list[int] = []
        """How many rows were scored together, one product after another."""

    def embed(self, token_ids: list[int], _start: int) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.float32)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.scored.append(len(hidden))
        return torch.full((len(hidden), VOCABULARY), -1e4).scatter(1, hidden.long(), 10.0)


class CannedSession:
    """Says the tokens `says`, one after another, from the end of a prompt on."""

    route = ("hop",)
    timings = ()

    def __init__(self, says: Sequence[int], tokenizer: Tokenizer, max_length: int) -> None:
        self.max_length = max_length
        self.token_ids: list[int] = []
        self.is_open = True
        self._says = says
        self._tokenizer = tokenizer
        self._said = -1

    @property
    def position(self) -> int:
        return len(self.token_ids)

    async def step(self, hidden: Buffer) -> Buffer:
        given = from_bytes(hidden, 1)
        self.token_ids += given[:, 0].int().tolist()
        assert self.position <= self.max_length
        self._said = 0 if len(given) > 1 else self._said + 1
        await trio.lowlevel.checkpoint()
        await self._go_wrong(self._tokenizer.decode(self.token_ids))
        return to_bytes(torch.full_like(given, float(self._says[self._said])))

    async def _go_wrong(self, text: str) -> None:
        if REFUSED in text:
            raise ConfigError("this model does not take this")
        if self._said != 1:
            return
        if FAIL in text:
            raise SessionLost([PeerUnreachable(GONE)])
        if INTERRUPT in text:
            _press_ctrl_c()
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the first one asks for the end
                await trio.sleep(0.05)
                _press_ctrl_c()
            await trio.sleep_forever()

    async def truncate(self, position: int) -> None:
        del self.token_ids[position:]
        self._said = -1

    async def fork(self, targets: Sequence[CannedSession]) -> None:
        for target in targets:
            target.token_ids = list(self.token_ids)


def _press_ctrl_c() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


class CannedRouter:
    """Opens canned sessions."""

    route = ("hop",)
    traffic = Traffic(0, 0, 0, 0)

    def __init__(self, says: Sequence[int], tokenizer: Tokenizer) -> None:
        self.sessions: list[CannedSession] = []
        self.lengths: list[int] = []
        """The lengths for which sessions were opened."""
        self._says = says
        self._tokenizer = tokenizer

    @asynccontextmanager
    async def open_session(self, max_length: int, *_terms: object) -> AsyncIterator[CannedSession]:
        assert 1 <= max_length <= CONTEXT_TOKENS
        self.lengths.append(max_length)
        self.sessions.append(session := CannedSession(self._says, self._tokenizer, max_length))
        try:
            yield session
        finally:
            session.is_open = False


class CannedClient(Client):
    """Says `says`, and then its end."""

    def __init__(self, tokenizer: Tokenizer, says: str = "é 好", **generation_config: Any) -> None:
        info = ModelInfo("canned", bytes(32), 2, 8, CONTEXT_TOKENS)
        config = GenerationConfig(**{"eos_token_id": END, **generation_config})
        self.canned_ends: Any = CannedEnds()
        said = tokenizer.encode(says)
        self.canned_router: Any = CannedRouter([*said, *[END] * CONTEXT_TOKENS], tokenizer)
        parts = ClientParts(info, self.canned_ends, tokenizer, config)
        super().__init__(parts, self.canned_router, Codec.RAW, ClientPolicy())
        self.asked: list[int | None] = []
        """How many new tokens, one text after another."""

    def generate(self, prompt: Sequence[int], max_new_tokens: int | None = None, **options: Any) -> Answer:
        self.asked.append(max_new_tokens)
        return super().generate(prompt, max_new_tokens, **options)

    async def transcript(self, _session: object) -> dict[str, Any]:
        return {"format": "canned"}


@contextmanager
def opened(client: CannedClient) -> Iterator[OpenClient]:
    """Stands in for `Access.open`."""
    with open_portal() as portal:
        yield OpenClient(portal, client)
