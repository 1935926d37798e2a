"""A swarm of real processes that find each other through a relay, lose one, and take another in."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

import llmnode
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.policy import LinkPolicy, SwarmPolicy
from llmnode.core.route import uncovered
from llmnode.core.view import online
from llmnode.errors import NoRoute, PeerUnreachable
from llmnode.models.names import EMBEDDED_MODEL
from llmnode.swarm.join import join_swarm
from process import forked, in_process
from process.forked import Forked
from process.other_policies import with_policies
from process.own_cache import cache_without_peers

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

LLMNODE = [sys.executable, "-P", "-m", "llmnode.node"]
LIFETIME_S = 15.0
FORGETFUL = with_policies({"SwarmPolicy.lifetime_s": LIFETIME_S, "SwarmPolicy.announce_every_s": LIFETIME_S / 3})
"""`llmnode` whose announcements are valid for a shorter time than usually."""
EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = 30
NEW_WITHIN_S = 10.0
DEAD_WITHIN_S = LIFETIME_S + 10.0


class Child:
    """A node as a user starts it; `ready` is its readiness object."""

    def __init__(self, program: Sequence[str], *arguments: str) -> None:
        self.process = Forked(
            [*program, *arguments, "--json", "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @functools.cached_property
    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        events = (json.loads(line) for line in self.process.stdout)
        return next(event for event in events if event["event"] == "ready")

    @property
    def address(self) -> str:
        address: str = self.ready["addresses"][0]
        return address


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*arguments: str, program: Sequence[str] = LLMNODE) -> Child:
        children.append(Child(program, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.process.communicate(timeout=20)


def serve(relay: Child, blocks: str) -> tuple[str, ...]:
    return ("serve", "--blocks", blocks, "--threads", "1", "--peers", relay.address)


def servers(relay: Child) -> list[dict[str, Any]]:
    """Descriptions of the servers of the one model by their first blocks. Together they hold all blocks."""
    shown = in_process.llmnode("status", "--peers", relay.address, "--json")
    assert shown.returncode == 0, shown.stderr
    (model,) = json.loads(shown.stdout)["models"]
    assert model["holes"] == []
    return list(model["servers"])


async def next_exchange() -> None:
    """The list of expired peers changes with time alone."""
    await trio.sleep(SwarmPolicy().exchange_every_s)


async def until(condition: Callable[[], bool], wait: Callable[[], Awaitable[None]], within_s: float) -> float:
    """Wait for `condition`, which only changes with what `wait` waits for; the seconds that it took."""
    started = trio.current_time()
    with trio.fail_after(within_s):
        while not condition():
            await wait()
    return trio.current_time() - started


def test_a_swarm_forms_loses_a_server_and_takes_another_in(
    start: Callable[..., Child], transformers_model: Any, record_property: Callable[[str, object], None]
) -> None:
    start = functools.partial(start, program=FORGETFUL)
    relay = start("relay")
    first = start(*serve(relay, "0:15"))
    first.ready  # noqa: B018 - so that the second one sees what is missing
    second = start(*serve(relay, "15"))
    assert second.ready["blocks"] == [15, 30], "the blocks that nobody held were not chosen"

    async def use() -> None:
        parts = load_parts()
        async with aconnect([relay.address], parts=parts) as client:
            assert [hop.peer for hop in client.route] == [first.ready["peer"], second.ready["peer"]]
            prompt = client.tokenizer.encode("The capital of France is")
            generation = await client.generate(prompt, 12, stop_at_eos=False)
            assert list(generation.token_ids) == greedy(transformers_model, prompt, 12)

            second.process.kill()
            second.process.wait()
            with pytest.raises((PeerUnreachable, NoRoute)):  # as long as it is in the view, and afterwards
                await client.generate(prompt, 12)

            async with join_swarm([relay.address], LinkPolicy()) as (_pool, swarm):
                digest = parts.model.digest

                def holes() -> list[Any]:
                    swarm.view.drop_expired(time.time_ns() // 1_000_000)
                    return uncovered(BLOCKS, [each.offer.span for each in online(swarm.view.of_model(digest))])

                gone_s = await until(lambda: bool(holes()), next_exchange, DEAD_WITHIN_S)
                record_property("dead_out_of_view_s", round(gone_s, 1))
                third = await trio.to_thread.run_sync(start, *serve(relay, "15"))
                await trio.to_thread.run_sync(lambda: third.ready)
                new_s = await until(lambda: not holes(), swarm.wait_changed, NEW_WITHIN_S)
                record_property("new_in_view_s", round(new_s, 1))
            # A client that outlived the loss goes on with the peers that it now knows.
            await until(
                lambda: third.ready["peer"] in {each.peer for each in online(client.swarm.view.announcements())},
                client.swarm.wait_changed,
                NEW_WITHIN_S,
            )
            generation = await client.generate(prompt, 12, stop_at_eos=False)
            assert list(generation.token_ids) == greedy(transformers_model, prompt, 12)
            # All, unless a dial takes longer than half a second: then its client brings the first ones.
            before, after = await trio.to_thread.run_sync(servers, relay)
            pushed, given = before["results_pushed"], after["steps_given_directly"]
            assert before["steps"] >= pushed > before["steps"] / 2, "first to the one that was killed"
            assert after["steps"] >= given > after["steps"] / 2, "by a server that may not have heard of it before"
            await client.generate(prompt, 12, stop_at_eos=False)
            ahead, behind = await trio.to_thread.run_sync(servers, relay)
            assert ahead["busy_us"] > before["busy_us"] > 0, "as it has computed"
            steps = ahead["steps"] - before["steps"]
            assert steps == ahead["results_pushed"] - pushed > 0, "all, once the two are connected"
            assert steps == behind["steps"] - after["steps"] == behind["steps_given_directly"] - given

    trio.run(use)


def test_status_names_the_holes_and_an_invite_of_a_server_alone_finds_it(
    start: Callable[..., Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(cache_without_peers(tmp_path / "cache")))
    server = start("serve", "--blocks", "4:6", "--threads", "1")
    addresses = server.ready["addresses"]
    made = in_process.llmnode("invite", "--no-mdns", "--json")
    assert made.returncode == 0 and "found on this machine: 1 server" in made.stderr, made.stderr
    invited = json.loads(made.stdout)
    assert (invited["peers"], invited["model"]) == (addresses, EMBEDDED_MODEL)
    shown = forked.run([*LLMNODE, "status", "--peers", server.address])
    assert shown.returncode == 1
    assert "nobody serves blocks [0, 4), [6, 30)" in shown.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run([*LLMNODE, *arguments])


def test_a_private_swarm_is_for_those_who_are_invited(start: Callable[..., Child], tmp_path: Path) -> None:
    key = str(tmp_path / "swarm.key")
    assert "makes one" in run("relay", "--swarm-key", key).stderr
    assert run("invite", "--swarm-key", key).returncode == 0
    relay = start("relay", "--swarm-key", key)
    assert relay.ready["invite"] is None, "it would have the key in it"
    made = run("invite", "--swarm-key", key, "--model", EMBEDDED_MODEL, "--json")
    assert json.loads(made.stdout)["peers"] == relay.ready["addresses"], "it runs here"
    invite = json.loads(made.stdout)["invite"]
    server = start("serve", invite, "--blocks", "0:30", "--threads", "1")
    assert server.ready["invite"] is None, "likewise"
    later = json.loads(in_process.llmnode("invite", "--swarm-key", key, "--json").stdout)
    assert later["model"] == EMBEDDED_MODEL, "the only one that is served"
    assert set(later["peers"]) == {*relay.ready["addresses"], *server.ready["addresses"]}
    for way_in in ((invite,), ("--swarm-key", key, "--peers", relay.address)):
        shown = in_process.llmnode("status", *way_in, "--json")
        assert [model["holes"] for model in json.loads(shown.stdout)["models"]] == [[]]
    prompt = ("--max-new-tokens", "4", "--prompt", "1, 2, 3,")
    invited = in_process.llmnode("generate", invite, "--json", "--temperature", "0", *prompt)
    assert invited.returncode == 0, invited.stderr
    answer = json.loads(invited.stdout)
    assert answer["model"] == EMBEDDED_MODEL
    with llmnode.connect(invite) as model:
        input_ids = torch.tensor([model.tokenizer.encode("1, 2, 3,")])
        made_here = model.generate(input_ids, max_new_tokens=4, do_sample=False)
        assert made_here[0, -4:].tolist() == answer["token_ids"]
    refused = in_process.llmnode("status", "--peers", server.address)
    assert refused.returncode == 1
    assert "swarm key" in refused.stderr
    damaged = run("status", invite[:-1])
    assert (damaged.returncode, damaged.stdout) == (2, "")
    assert "damaged" in damaged.stderr
    assert invite not in run("config", "status").stdout
    assert "no peers are named" in run("generate", *prompt).stderr


def test_the_precision_of_a_swarm_is_found_unless_one_is_named(start: Callable[..., Child]) -> None:
    server = start("serve", "--blocks", "auto", "--dtype", "bfloat16", "--threads", "1")
    generate = ("generate", "--peers", server.address, "--max-new-tokens", "8", "--prompt", "1, 2, 3,")
    done = in_process.llmnode(*generate)
    assert done.returncode == 0, done.stderr
    assert "4, 5" in done.stdout
    assert "bfloat16: one server has the whole model in it, and nobody serves float32" in done.stderr
    refused = in_process.llmnode(*generate, "--dtype", "float32")
    assert refused.returncode == 1
    assert "held in bfloat16" in refused.stderr and "--dtype" in refused.stderr


def test_the_example_of_an_embedded_node() -> None:
    done = in_process.program(EXAMPLES / "embed_node.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert "serving blocks (0, 30)" in done.stderr


def greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
