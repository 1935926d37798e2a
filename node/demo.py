"""`llmnode demo`: a private swarm of real processes on this machine, and text generated through it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from rich.live import Live
from rich.table import Table

from llmnode.core.span import split_evenly
from llmnode.errors import ConfigError, single_error
from llmnode.machine.startup import collection_paused
from llmnode.node.generate import DEFAULT_NEW_TOKENS
from llmnode.node.outcome import describe_empty
from llmnode.node.processes import (
    ENDED,
    READY,
    STARTING,
    ServerDied,
    ServerProcess,
    all_ready,
    last_words,
    private_swarm,
    pss_mib,
)
from llmnode.node.terminal import Pieces, note, open_console, say, show_json, tell
from llmnode.node.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.connect import Client, ClientParts
    from llmnode.core.span import Span
    from llmnode.models.text.tokenizer import Tokenizer

EMBEDDED_BLOCKS = 30
"""SmolLM2-135M has these. So the servers can start before this process has read the model's config."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The options of `llmnode demo`. Without `max_new_tokens` the default is that of `llmnode generate`.

    `threads` is how many torch has in every process, None for its own choice.
    """

    servers: int
    prompt: str
    max_new_tokens: int | None
    chat: bool
    json: bool
    threads: int | None


async def demo(config: DemoConfig) -> None:
    """Start the servers, generate, stop them. Raises ServerDied if one of them dies on the way."""
    started_s = time.perf_counter()
    spans = split_evenly(EMBEDDED_BLOCKS, config.servers)
    console = open_console(stderr=True)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    lines = ServerLines()

    def draw(servers: Sequence[ServerProcess]) -> None:
        if live is not None:
            live.update(_table(servers), refresh=True)
        else:
            lines.tell(servers)

    with single_error(), live or nullcontext():
        if live is None:
            tell(f"starting {counted(config.servers, 'server')} on this machine, and loading the client's part")
        async with private_swarm(spans, threads=config.threads, on_change=draw) as servers:
            draw(servers)
            # Torch and libp2p take seconds to import: the servers do the same meanwhile.
            parts = await trio.to_thread.run_sync(_load_parts, config.threads, abandon_on_cancel=True)
            await all_ready(servers)
            if live is not None:
                live.stop()
            else:
                tell("all servers are ready, and the client connects to them")
            async with trio.open_nursery() as nursery:
                for server in servers:
                    nursery.start_soon(_raise_when_ended, server)
                await _generate(config, servers, parts, started_s)
                nursery.cancel_scope.cancel()


class ServerLines:
    """The lines about servers where there is no terminal to draw them in: each state of a server once.

    That one has ended is an error, or in order, and others tell it.
    """

    def __init__(self) -> None:
        self._told: dict[Span, str] = {}

    def tell(self, servers: Sequence[ServerProcess]) -> None:
        for server in servers:
            if server.state not in (ENDED, self._told.get(server.span, STARTING)):
                self._told[server.span] = server.state
                peer = f", peer {server.peer}" if server.state == READY else ""
                tell(f"blocks {server.span}: {server.state}{peer}")


def _load_parts(threads: int | None) -> ClientParts:
    with collection_paused():
        from llmnode.client.connect import load_parts
        from llmnode.machine.threads import use_threads

        use_threads(threads)
        return load_parts()


async def _generate(config: DemoConfig, servers: Sequence[ServerProcess], parts: ClientParts, started_s: float) -> None:
    from llmnode.client.connect import aconnect
    from llmnode.client.generate import Generation
    from llmnode.client.sampling import Sampling
    from llmnode.node.text import ScreenText

    async with aconnect([server.address for server in servers], parts=parts) as client:
        ready_s = time.perf_counter() - started_s
        prompt = _encode(client.tokenizer, config)
        asked = _new_tokens(client, config, prompt)
        screen = ScreenText(Pieces(beside=config.json))
        if not config.chat:
            screen.screen.write(config.prompt)
        tokens = []
        async with client.generate(prompt, asked, sampling=Sampling(temperature=0)) as answer:
            async for token in answer:
                tokens.append(token)
                screen.show(token)
        screen.screen.write("\n")
        generation = Generation(tuple(tokens), screen.text)
        ends = Sampling().of(client.generation_config).end_tokens
        if why := describe_empty(generation.token_ids, generation.text, ends):
            say(f"the text is empty: {why}; give another --prompt")
        first_s = ready_s + generation.time_to_first_token_s
        note(f"{screen.speed_line()}; {first_s:.1f} s from the start of the demo")
        if config.json:
            summary = {
                "model": client.model.name,
                "servers": _servers_json(servers),
                "prompt_token_ids": prompt,
                "token_ids": list(generation.token_ids),
                "text": generation.text,
                "finish_reason": generation.finish.reason,
                "tokens_per_s": generation.tokens_per_s,
                "time_to_first_token_s": generation.time_to_first_token_s,
                "start_to_first_token_s": first_s,
                "client_pss_mib": pss_mib(),
            }
            show_json(summary)


def _encode(tokenizer: Tokenizer, config: DemoConfig) -> list[int]:
    return tokenizer.encode_dialogue([("user", config.prompt)]) if config.chat else tokenizer.encode(config.prompt)


def _new_tokens(client: Client, config: DemoConfig, prompt: list[int]) -> int:
    """Raises ConfigError if nothing can follow this prompt, or fewer tokens than are asked for."""
    from llmnode.client.generate import check_length, most_new_tokens

    try:
        asked = config.max_new_tokens or min(DEFAULT_NEW_TOKENS, most_new_tokens(len(prompt), client.model))
        check_length(len(prompt), asked, client.model)
    except ConfigError as error:
        raise ConfigError(f"--prompt: {error}") from error
    return asked


def _servers_json(servers: Sequence[ServerProcess]) -> list[dict[str, object]]:
    return [
        {
            "peer": server.peer,
            "blocks": [server.span.start, server.span.end],
            "tensor_mib": server.tensor_bytes / 2**20,
            "pss_mib": server.pss_mib,
        }
        for server in servers
    ]


async def _raise_when_ended(server: ServerProcess) -> None:
    """Nobody else here holds its blocks, so that there is nothing to wait for."""
    await server.process.wait()
    raise ServerDied(f"the server of blocks {server.span} ended: {last_words(server)}")


def _table(servers: Sequence[ServerProcess]) -> Table:
    table = Table(title=f"{counted(len(servers), 'server')} on this machine", title_justify="left")
    for column in ("blocks", "peer", "pid", "state"):
        table.add_column(column)
    for server in servers:
        style = {READY: "green", ENDED: "red"}.get(server.state, "yellow")
        table.add_row(str(server.span), server.peer or "-", str(server.pid), f"[{style}]{server.state}[/]")
    return table
