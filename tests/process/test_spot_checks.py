"""Spot checks of SmolLM2 on real servers: the tolerance lets every honest one pass, and finds one that adds noise."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.client.connect import ClientParts, aconnect, load_parts
from llmnode.client.generate import run_blocks
from llmnode.core.policy import ClientPolicy, SpotCheckPolicy
from llmnode.errors import IntegrityError, SessionLost
from process.conftest import Node
from process.forked import Forked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.session.session import InferenceSession

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

SERVERS = Path(__file__).with_name("checked_servers.py")
POLICY = ClientPolicy(spot_checks=SpotCheckPolicy(1.0), chunk_tokens=16)
PROMPT = "Whoever computes something else than two others is not asked again, and what it said is not believed."
NEW_TOKENS = 12
HALVES = ["0:15", "15:30"]


@pytest.fixture(scope="module")
def parts() -> ClientParts:
    return load_parts()


@contextmanager
def serve(blocks: Sequence[str]) -> Iterator[list[dict[str, Any]]]:  # Any: JSON
    """Nodes of one swarm; each `peer` and its `addresses`."""
    command = [sys.executable, "-P", str(SERVERS), *blocks]
    pipe = subprocess.PIPE
    with Forked(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        node = Node(process)
        try:
            node.wait_ready()
            yield node.ready["nodes"]
            node.stop()
        finally:
            process.kill()


def addresses_of(nodes: Sequence[dict[str, Any]]) -> list[str]:
    return [address for node in nodes for address in node["addresses"]]


async def speak(session: InferenceSession, parts: ClientParts, new_tokens: int) -> None:
    """The likeliest text after the prompt, each step checked before the next."""
    assert session.spot_checks is not None
    fresh = parts.tokenizer.encode(PROMPT)
    for _ in range(new_tokens):
        hidden = parts.ends.embed(fresh, session.position)
        output = await run_blocks(session, hidden)
        await session.spot_checks.finish()
        fresh = [int(parts.ends.logits(output[-1:]).argmax())]


def test_honest_servers_pass_every_check(parts: ClientParts) -> None:
    async def check(addresses: Sequence[str], codec: str) -> None:
        async with aconnect(addresses[:1], parts=parts, policy=POLICY, codec=codec) as client:
            await client.swarm.meet_all(addresses)  # or the first may not have heard yet that the last is online
            async with client.inference_session(128) as session:
                await speak(session, parts, NEW_TOKENS)
                checks = session.spot_checks
                assert checks is not None
                assert (checks.undecided, checks.given_up) == (0, 0)
                assert checks.passed >= NEW_TOKENS
                print(f"{codec}: {checks.passed} passed, at most {checks.largest_deviation:.1e} apart")

    with serve([*HALVES, *HALVES]) as nodes:
        for codec in ("raw", "int8"):
            trio.run(check, addresses_of(nodes), codec)


def test_a_server_that_adds_noise_is_found(parts: ClientParts) -> None:
    async def check(nodes: Sequence[dict[str, Any]]) -> None:
        *honest, noisy = [node["peer"] for node in nodes]
        async with aconnect(nodes[0]["addresses"], parts=parts, policy=POLICY) as client:
            await client.swarm.meet_all(addresses_of(nodes))
            for _ in range(16):
                client.router.finder.suspect(honest)  # or which of three equals is taken were chance
            async with client.inference_session(128) as session:
                assert session.route[-1].peer == noisy
                with pytest.raises(SessionLost) as lost:
                    await speak(session, parts, NEW_TOKENS)
            (cause,) = lost.value.causes
            assert isinstance(cause, IntegrityError)
            assert cause.peer == noisy
            async with client.inference_session(128) as session:
                assert noisy not in {hop.peer for hop in session.route}
                await speak(session, parts, 2)

    with serve(["0:15", "15:30", "15:30", "15:30~"]) as nodes:
        trio.run(check, nodes)
