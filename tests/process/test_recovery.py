"""Sessions of real processes outlive their servers, token for token: one session, and several that make a text.

The former is the thin form of `tests/bench/run failures`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio
from transformers import LogitsProcessor, LogitsProcessorList

import llmnode
from bench.failures.cells import THIN
from bench.failures.failures import Undisturbed, open_matrix
from bench.failures.replicas import replicas, start_all
from llmnode.client.beginnings import beginnings
from llmnode.client.connect import aconnect, load_parts
from process.forked import Forked
from process.test_beams import NEW_TOKENS, TEXTS, both, check_beams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.failures.cells import Cell
    from bench.failures.failures import Outcome
    from bench.failures.replicas import Replica
    from bench.kit.exact import Reference

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def servers(folder: Any) -> Iterator[list[Replica]]:
    """Two for each third of the model, which tests end: they start those that they need."""
    with replicas(folder.info.blocks, 1, Forked) as servers:
        trio.run(start_all, servers, servers)
        yield servers


@pytest.fixture(scope="module")
def undisturbed(servers: list[Replica], reference: Reference) -> Undisturbed:
    async def measure() -> Undisturbed:
        async with open_matrix(servers, load_parts(), reference) as matrix:
            return matrix.undisturbed

    return trio.run(measure)


@pytest.mark.parametrize("cell", THIN, ids=str)
def test_a_session_outlives(
    cell: Cell,
    servers: list[Replica],
    reference: Reference,
    undisturbed: Undisturbed,
    record_property: Callable[[str, object], None],
) -> None:
    async def play() -> Outcome:
        async with open_matrix(servers, load_parts(), reference, undisturbed) as matrix:
            return await matrix.play(cell)

    outcome = trio.run(play)
    assert not outcome.error
    assert outcome.recoveries
    record_property("near_ties", outcome.near_ties)  # counted over all in `tests/bench/run failures`
    record_property("beyond_one_prefill_s", round(outcome.pause.beyond_s, 2))


# Several sessions


class KillAt(LogitsProcessor):  # type: ignore[misc]  # transformers is typed in part
    """Ends a server when a given number of tokens has been scored."""

    def __init__(self, tokens: int, kill: Callable[[], None]) -> None:
        self._left = tokens
        self._kill = kill

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._kill()
        return scores


def addresses(servers: Sequence[Replica], third: int) -> list[str]:
    """Counts only servers that live, as both of this third do now."""
    twins = [server for server in servers if server.span == servers[third].span]
    trio.run(start_all, [server for server in twins if not server.answers], servers)
    return [server.address for server in servers if server.answers]


@pytest.mark.parametrize("third", range(3))
def test_beams_outlive_a_server_that_is_killed_in_the_middle(
    third: int, servers: list[Replica], transformers_model: Any, tokenizer: Any
) -> None:
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    killed: list[Replica] = []

    def kill() -> None:
        peer = model._client.route[third].peer
        killed.extend(server for server in servers if server.peer == peer)
        killed[0].kill()

    with llmnode.connect(peers=addresses(servers, third)) as model:
        killer = LogitsProcessorList([KillAt(5, kill)])
        ours, theirs = both(model, transformers_model, inputs, **options, logits_processor=killer)
    check_beams(ours, theirs)
    assert len(killed) == 1


SHARED = "You are a clerk in the town hall, who answers what people ask in a few simple words. Somebody asks:"
ASKED = [f"{SHARED} {question}" for question in ("Where is the door?", "Who is the mayor of this town?", "What now?")]


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_that_begin_alike_outlive_a_server_that_is_killed(
    tokens: int, servers: list[Replica], transformers_model: Any, tokenizer: Any
) -> None:
    """Its replay includes the prefix that they share."""
    inputs = tokenizer(ASKED, return_tensors="pt", padding=True)
    killed: list[Replica] = []

    def kill() -> None:
        victim = model._client.route[1].peer
        killed.extend(server for server in servers if server.peer == victim)
        killed[0].kill()

    with llmnode.connect(peers=addresses(servers, 1)) as model:
        killer = LogitsProcessorList([KillAt(tokens, kill)])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        chosen = model.generate(**inputs, **options, logits_processor=killer)
    assert chosen.tolist() == transformers_model.generate(**inputs, **options).tolist()
    assert len(killed) == 1


def test_texts_go_on_from_a_beginning_whose_server_was_killed(
    servers: list[Replica], transformers_model: Any, tokenizer: Any
) -> None:
    prompts = tokenizer(ASKED).input_ids
    killed: list[Replica] = []
    peers = addresses(servers, 1)

    async def generate() -> list[list[int]]:
        texts: list[list[int]] = []
        async with aconnect(peers) as client, beginnings(client, prompts, 1) as begun:
            for each, prompt in zip(begun, prompts, strict=True):
                async with each.session(len(prompt) + NEW_TOKENS) as session:
                    assert session.position > 20
                    if not killed:
                        killed.extend(server for server in servers if server.peer == session.route[1].peer)
                        killed[0].kill()
                    generation = await client.generate(prompt, NEW_TOKENS, session=session)
                    texts.append([*prompt, *generation.token_ids])
        return texts

    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    for chosen, prompt in zip(trio.run(generate), prompts, strict=True):
        inputs = torch.tensor([prompt])
        expected = transformers_model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        assert [chosen] == expected.tolist()
    assert len(killed) == 1
