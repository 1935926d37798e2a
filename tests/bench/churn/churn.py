"""`tests/bench/run churn`: twelve real servers of uneven speed choose their blocks. Some are killed and come back.

Each serves a few blocks of SmolLM2-135M, and is slower than the machine by a time of its own. A seed draws which of
them are killed, and when. Clients in this process generate texts all the time. All texts are compared with those of
transformers. Blocks that nobody serves are counted in seconds, and the time until the clients are as fast as before.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import trio

from bench.churn.fleet import MOVING, STAYING, Server, end_all, kill, start, until_ready
from bench.churn.slowed import LIFETIME_S, hurry
from bench.kit.exact import Reference, judge_all
from bench.kit.options import add_thin
from bench.kit.report import Report, Row, at_most, exact_tokens, exactly, few_near_ties, spread
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.view import online
from llmnode.errors import LlmnodeError, single_error
from llmnode.models.embedded import open_embedded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.client.connect import Client, ClientParts

SEED = 0
PROMPT_TOKENS, NEW_TOKENS = 24, 32
PROMPTS = 8
LOOKS_EVERY_S = 0.25
WINDOW_S = 5.0
"""Throughput is that of a window of this length."""
RECOVERED = 0.8
"""The share of the throughput before a kill at which the clients count as fast again."""
ALLOWED_GAP_S = LIFETIME_S + 10.0
"""A killed server is in views until then, and its successor has to decide and to load."""
START_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run. Every `every_s` seconds `killed` servers are killed, which come back after `away_s`."""

    servers: int = 12
    blocks: tuple[int, int] = (5, 9)
    slower_us: tuple[int, int] = (300, 2000)
    clients: int = 3
    kills: int = 5
    killed: int = 2
    every_s: float = 50.0
    away_s: float = 35.0


WHOLE = Plan()
THIN = Plan(servers=4, blocks=(15, 15), clients=1, kills=1, killed=1, every_s=5.0, away_s=2.0)


@dataclass(slots=True)
class Record:
    """The events of a run, in seconds of its clock."""

    tokens: list[float] = field(default_factory=list)
    """When each token came."""
    texts: set[tuple[int, ...]] = field(default_factory=set)
    sessions: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    recoveries: int = 0

    def speed(self, from_s: float, to_s: float) -> float:
        return sum(from_s <= each < to_s for each in self.tokens) / (to_s - from_s)

    def recovered_s(self, killed_s: float, until_s: float) -> float | None:
        """The time from a kill until a window is as fast as those before it. None if it never was until `until_s`."""
        before = self.speed(killed_s - 2 * WINDOW_S, killed_s)
        from_s = killed_s
        while from_s + WINDOW_S <= until_s:
            if self.speed(from_s, from_s + WINDOW_S) >= RECOVERED * before:
                return from_s - killed_s
            from_s += LOOKS_EVERY_S
        return None


def add(parser: argparse.ArgumentParser) -> None:
    add_thin(parser)


async def run(options: Options) -> Report:
    plan, record, rng = THIN if options.thin else WHOLE, Record(), random.Random(SEED)
    hurry()  # our view forgets killed servers as soon as theirs do
    folder = open_embedded()
    parts = load_parts(folder)
    with single_error(), TemporaryDirectory() as place:
        servers = [
            Server(f"s{number}", rng.randint(*plan.blocks), rng.randint(*plan.slower_us), Path(place) / f"{number}.key")
            for number in range(plan.servers)
        ]
        try:
            async with trio.open_nursery() as nursery:
                await _start_all(servers, nursery)
                until_s = await _use(plan, servers, parts, record, rng, nursery)
                nursery.cancel_scope.cancel()
        finally:
            await end_all(servers)
    print(f"comparing {len(record.texts)} different texts with transformers", file=sys.stderr)
    reference = await trio.to_thread.run_sync(Reference, folder.path)
    ties, wrong = judge_all(reference, record.texts, PROMPT_TOKENS)
    return _report(plan, servers, record, until_s, (ties, wrong))


async def _start_all(servers: Sequence[Server], nursery: trio.Nursery) -> None:
    with trio.fail_after(START_S):
        for server in servers:
            print(f"starting {server.name}: {server.blocks} blocks, {server.slower_us} us slower", file=sys.stderr)
            await start(server, [each.address for each in servers if each.lives][:3], nursery)
            await until_ready([server])


async def _use(
    plan: Plan, servers: Sequence[Server], parts: ClientParts, record: Record, rng: random.Random, nursery: trio.Nursery
) -> float:
    """Let clients use the swarm while servers come and go. Returns when it was over."""
    words = parts.tokenizer.encode(topics["types"])
    prompts = [words[PROMPT_TOKENS * each : PROMPT_TOKENS * (each + 1)] for each in range(PROMPTS)]
    async with aconnect([each.address for each in servers], parts=parts) as client, trio.open_nursery() as users:
        await client.swarm.ask_around()
        users.start_soon(_look, client, servers, parts.model.blocks, record)
        for _ in range(plan.clients):
            users.start_soon(_generate, client, prompts, record, random.Random(rng.random()))
        await trio.sleep(plan.every_s)
        for _ in range(plan.kills):
            await _kill_some(plan, servers, record, rng, nursery)
        await trio.sleep(plan.every_s)
        users.cancel_scope.cancel()
    return trio.current_time()


async def _kill_some(
    plan: Plan, servers: Sequence[Server], record: Record, rng: random.Random, nursery: trio.Nursery
) -> None:
    """And start them again later."""
    began_s = trio.current_time()
    victims = rng.sample([each for each in servers if each.lives], plan.killed)
    record.kills.append(began_s)
    for victim in victims:
        print(f"killing {victim.name}", file=sys.stderr)
        await kill(victim)
    await trio.sleep_until(began_s + plan.away_s)
    for victim in victims:
        await start(victim, [each.address for each in servers if each.lives][:3], nursery)
    with trio.fail_after(START_S):
        await until_ready(victims)
    await trio.sleep_until(began_s + plan.every_s)


async def _generate(client: Client, prompts: Sequence[list[int]], record: Record, rng: random.Random) -> None:
    """Text after text, until cancelled."""
    while True:
        prompt = rng.choice(prompts)
        record.sessions += 1
        text = [*prompt]
        try:
            async with client.inference_session(PROMPT_TOKENS + NEW_TOKENS) as session:
                async for token in client.generate(prompt, NEW_TOKENS, stop_at_eos=False, session=session):
                    text.append(token.id)
                    record.tokens.append(trio.current_time())
                record.recoveries += len(session.recoveries)
        except LlmnodeError as error:
            record.failed.append(str(error))
            print(f"a session failed: {error}", file=sys.stderr)
            await trio.sleep(LOOKS_EVERY_S)
        finally:
            record.texts.add(tuple(text))


async def _look(client: Client, servers: Sequence[Server], blocks: int, record: Record) -> None:
    """Note when no server that lives serves some block, until cancelled."""
    since_s: float | None = None
    try:
        while True:
            gap = not set(range(blocks)) <= set(_served(client, servers))
            now_s = trio.current_time()
            if gap and since_s is None:
                since_s = now_s
            elif not gap and since_s is not None:
                record.gaps.append((since_s, now_s))
                print(f"a gap of {now_s - since_s:.1f} s", file=sys.stderr)
                since_s = None
            await trio.sleep(LOOKS_EVERY_S)
    finally:
        if since_s is not None:
            record.gaps.append((since_s, trio.current_time()))


def _served(client: Client, servers: Sequence[Server]) -> Iterator[int]:
    living = {each.peer for each in servers if each.lives}
    for announced in online(client.swarm.view.of_model(client.model.digest)):
        if announced.peer in living:
            yield from range(announced.offer.span.start, announced.offer.span.end)


def _report(plan: Plan, servers: Sequence[Server], record: Record, until_s: float, judged: tuple[int, int]) -> Report:
    ties, wrong = judged
    ends = [*record.kills[1:], until_s]
    recovered = [record.recovered_s(*each) for each in zip(record.kills, ends, strict=True)]
    found = [each for each in recovered if each is not None]
    gaps = [to_s - from_s for from_s, to_s in record.gaps]
    moves = sum(each.count(MOVING) for each in servers)
    given_up = sum(each.count(STAYING) for each in servers)
    row: Row = {
        "servers": plan.servers,
        "tokens/s": record.speed(record.tokens[0], until_s) if record.tokens else 0.0,
        "gaps, s": sum(gaps),
        "longest gap, s": max(gaps, default=0.0),
        "fast again after, s": spread(found) if found else "-",
        "moves": moves,
        "moves given up": given_up,
        "sessions": record.sessions,
        "recoveries": record.recoveries,
    }
    aims: list[Aim] = [
        exact_tokens(wrong),
        few_near_ties(ties, sum(len(text) - PROMPT_TOKENS for text in record.texts)),
        exactly("sessions that failed", len(record.failed)),
        at_most("longest gap, s", max(gaps, default=0.0), ALLOWED_GAP_S),
        exactly("kills after which clients were not as fast as before", len(recovered) - len(found)),
    ]
    conditions = {
        "kills": plan.kills,
        "killed at once": plan.killed,
        "away_s": plan.away_s,
        "seed": SEED,
        "blocks": sum(each.blocks for each in servers),
        "slower_us": statistics.median(each.slower_us for each in servers),
        "failures": dict(Counter(record.failed)),
    }
    return Report([row], aims, conditions, "see the README")
