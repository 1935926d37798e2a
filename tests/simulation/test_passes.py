"""Outputs and gradients through a swarm without a session, right to the bit while servers fail, and beside decodes."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from llmnode.core.operations import Backward, DeepPrompts
from llmnode.core.peers.absence import TOLD_AGAIN_S
from llmnode.core.policy import ClientPolicy, RecoveryPolicy, ServePolicy
from llmnode.core.sequences import grouped
from llmnode.core.span import Span
from llmnode.errors import ConfigError, NoRoute, PeerRefused, SessionLost
from llmnode.node.serve import pass_parts
from llmnode.session import passes
from llmnode.session.passes import SwarmPasses
from llmnode.testing import Cast, FaultPlan, Odds, open_world, seeds
from llmnode.testing.exact_blocks import exact_input
from llmnode.testing.faults import FailForwards, Freeze, Kill, Restart, Stop
from llmnode.testing.worker import ExactExecutor
from llmnode.wire import deep_prompts
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode, pack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields
from llmnode.wire.refusal import refusal_of
from simulation.passes import (
    LENGTHS,
    drawn,
    drawn_prompts,
    expected_gradient,
    expected_output,
    nothing_is_left,
    there_and_back,
    watch_passes,
)
from simulation.world import (
    ALL_BLOCKS,
    DELAY_S,
    FORWARD_S,
    MODEL,
    ROW,
    SPANS,
    Dialogue,
    pairs_of_servers,
    simulated,
    world,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Pass as Operation
    from llmnode.wire.frame import Frame

CAST = Cast(
    nodes=[f"{index}{twin}" for index in range(3) for twin in "ab"],
    spans=[*SPANS, Span(0, 3), Span(3, 6), Span(1, 5), Span(0, 6)],
    movable=["0b", "1b", "2b"],
)
LONGEST_OUTAGE_S = 12.0


@simulated
async def test_outputs_and_gradients_come_through_several_servers_and_any_part_of_the_blocks() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        for seed, span in enumerate((ALL_BLOCKS, Span(1, 5), Span(3, 4), Span(0, 2))):
            await there_and_back(client, seed, LENGTHS, span)
            await there_and_back(client, seed, LENGTHS, span, drawn_prompts(random.Random(3), LENGTHS, span))
        nothing_is_left(swarm)


@simulated
async def test_deep_prompts_that_are_large_go_in_several_parts_and_larger_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By sequences, and by blocks."""
    monkeypatch.setattr(deep_prompts, "MOST_PASS_BYTES", 4 * ROW)
    async with open_world(serve_policy=ServePolicy(pass_prompt_bytes=4 * ROW)) as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            for rows, positions in ((1, 3), (1, 4), (5, 1), (5, 2)):
                prompts = DeepPrompts(6, rows, positions, exact_input(random.Random(7), 6 * rows * positions))
                await there_and_back(client, rows, [4] * 5, prompts=prompts)
            too_long = DeepPrompts(6, 1, 5, exact_input(random.Random(7), 6 * 5))
            with pytest.raises(ConfigError, match="servers take 4"):
                await client.outputs(ALL_BLOCKS, [8], drawn(1, 8), prompts=too_long)
            with pytest.raises(ConfigError, match="for a sequence of 3"):
                await client.outputs(ALL_BLOCKS, [8, 3], drawn(1, 11), prompts=too_long)
            with pytest.raises(ConfigError, match="not finite"):
                await client.outputs(ALL_BLOCKS, [8], drawn(1, 8), prompts=DeepPrompts(6, 1, 1, b"\xff" * 6 * ROW))
            nothing_is_left(swarm)


@pytest.mark.parametrize("seed", seeds(35, long_run=60))  # the last that takes a new branch is 29
@simulated
async def test_they_are_right_to_the_bit_whatever_fails(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactExecutor, "passes_beside", bool(seed % 2))
    rng = random.Random(seed)
    kinds = [Kill, Restart, Stop, Freeze, FailForwards, FailForwards]
    plan = FaultPlan.draw(seed, CAST, Odds(rng.randrange(1, 5), longest_s=LONGEST_OUTAGE_S, kinds=kinds))
    recovery, is_repeatable = RecoveryPolicy(timeout_s=10 * LONGEST_OUTAGE_S), seed % 3 == 0
    policy = ClientPolicy(recovery=recovery, deterministic=is_repeatable)
    most, most_alone = 30, 20
    monkeypatch.setattr(passes, "MOST_POSITIONS", most)
    monkeypatch.setattr(pass_parts, "_ALONE_BYTES", most_alone * ROW)
    computed, splits = watch_passes(monkeypatch), set()
    async with pairs_of_servers(seed) as swarm, swarm.client(policy) as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        async with plan.upon(swarm):
            for step in range(8):
                lengths = rng.choices([1, 3, 20], k=rng.randint(1, 6))
                splits |= {part for group in grouped(lengths, most) for part in grouped(group, most_alone)}
                await there_and_back(client, 100 * seed + step, lengths, prompts=drawn_prompts(rng, lengths))
                await trio.sleep(rng.choice([0, 0.2, 2]))
    if is_repeatable:
        assert {len(together) for together in computed} == {1}
        assert {each.lengths for (each,) in computed} == splits, "the same as without failures"


@simulated
async def test_a_lossy_codec_is_refused_where_training_is_to_be_repeatable() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client, hidden = SwarmPasses(router.finder, Codec.FP16), drawn(1, 3)
        with pytest.raises(ConfigError, match="choose the codec raw"):
            await client.outputs(ALL_BLOCKS, [3], hidden, deterministic=True)
        await client.outputs(ALL_BLOCKS, [3], hidden)
        exact = SwarmPasses(router.finder, Codec.RAW)
        assert (await exact.outputs(ALL_BLOCKS, [3], hidden, deterministic=True))[0] == expected_output(hidden, [3])


@simulated
async def test_a_backward_runs_on_another_server_than_its_forward_even_on_two() -> None:
    async with world() as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            hidden, gradient = drawn(1, 8), drawn(2, 8)
            output, crossed = await client.outputs(ALL_BLOCKS, [8], hidden)
            assert output == expected_output(hidden, [8])
            assert [len(each.borders) for each in crossed] == [1]
            for name, span in (("first", Span(0, 4)), ("second", Span(4, 6))):
                await swarm.start(name, span)
            await trio.sleep(5)  # they are heard of
            swarm.kill("whole")
            assert await client.gradients(crossed, gradient) == expected_gradient(gradient, [8])


@simulated
async def test_without_a_server_for_some_blocks_it_ends_in_time() -> None:
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=5.0))
    async with world() as swarm:
        await swarm.start("half", Span(0, 3))
        async with swarm.client(policy) as (router, _):
            client, began_s = SwarmPasses(router.finder, Codec.RAW), trio.current_time()
            with pytest.raises((NoRoute, SessionLost)):
                await client.outputs(ALL_BLOCKS, [4], drawn(1, 4))
            assert trio.current_time() - began_s < 10


@simulated
async def test_while_the_only_server_is_gone_all_passes_together_say_once_what_they_wait_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=TOLD_AGAIN_S - 2))
    async with world() as swarm:
        await swarm.start("only", ALL_BLOCKS)
        await swarm.start("half", Span(0, 3))
        async with swarm.client(policy) as (router, _):
            client = SwarmPasses(router.finder, Codec.RAW)
            await client.outputs(ALL_BLOCKS, [4] * 8, drawn(1, 32))
            swarm.kill("only")
            with caplog.at_level(logging.WARNING, "llmnode"), pytest.raises((NoRoute, SessionLost)):
                await client.outputs(ALL_BLOCKS, [4] * 8, drawn(1, 32))
    told = [each.getMessage() for each in caplog.records if "trying again for" in each.getMessage()]
    assert len(told) == 1, told
    assert "no peer holds blocks [3, 6)" in told[0]


@pytest.mark.parametrize(("beside", "waits_s"), [(True, 0.0), (False, FORWARD_S)], ids=["beside", "in turn"])
@simulated
async def test_decodes_wait_for_no_pass_that_is_computed_beside_them_and_else_for_one_part_at_most(
    beside: bool, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExactExecutor, "passes_beside", beside)
    async with world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _), swarm.session() as (session, _):
            dialogue, client = Dialogue(session, random.Random(1)), SwarmPasses(router.finder, Codec.RAW)
            await dialogue.step(5)
            alone_s = await _time_of(partial(dialogue.step, 1))
            waiting, times_s = node.worker._pass_track.scheduler._passes, []

            async def train(seed: int) -> None:
                while True:
                    await there_and_back(client, seed, [20] * 8)

            async with trio.open_nursery() as nursery:
                for seed in range(4):
                    nursery.start_soon(train, seed)
                await trio.sleep(10 * DELAY_S)
                for _ in range(10):
                    assert len(waiting), "or are computed"
                    times_s.append(await _time_of(partial(dialogue.step, 1)))
                nursery.cancel_scope.cancel()
            assert max(times_s) <= alone_s + waits_s + 0.001


async def _time_of(call: Callable[[], object]) -> float:
    began_s = trio.current_time()
    await call()  # type: ignore[misc]
    return trio.current_time() - began_s


def _meta(**changes: object) -> bytes:
    fields = {
        **profile_fields(MODEL.profile),
        "span_start": 0,
        "span_end": 2,
        "codec": "raw",
        "priority": "training",
        "lengths": [3],
    }
    return pack(Pass(**{**fields, **changes}))  # type: ignore[arg-type]


@simulated
async def test_what_is_wrong_with_a_pass_is_refused_and_the_link_goes_on() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        _, connections = await router.finder.find(Span(0, 2), 0, (), hurry=False)
        (connection,) = connections.values()

        async def ask(kind: FrameType, payload: bytes, **changes: object) -> None:
            answer = FrameType.EVALUATED if kind is FrameType.EVALUATE else FrameType.GRADIENT
            await connection.ask_peer(kind, answer, 10.0, _meta(**changes), payload)

        numbers = bytes(3 * ROW)
        for code, payload, changes in (
            ("bad-message", numbers[1:], {}),
            ("bad-message", numbers, {"span_start": 2}),
            ("bad-message", b"\xff" * len(numbers), {}),
            ("no-room", numbers, {"lengths": [10_000]}),
            ("no-room", numbers, {"lengths": [MODEL.context_tokens + 1]}),
            ("span-not-held", numbers, {"span_end": 3}),
            ("wrong-model", numbers, {"model_digest": bytes(32)}),
            ("unknown-codec", numbers, {"codec": "morse"}),
            ("unknown-adapter", numbers, {"adapter": bytes(32)}),
            ("unknown-extension", numbers, {"extensions": {"x": 1}, "required": ["x"]}),
            ("bad-message", numbers, {"extensions": {"prompts": [1, 1]}, "required": ["prompts"]}),
            ("bad-message", numbers, {"extensions": {"prompts": [1, 4]}}),
            ("bad-message", numbers, {"extensions": {"prompts": "soon"}}),
        ):
            for kind in (FrameType.EVALUATE, FrameType.BACKWARD):
                with pytest.raises(PeerRefused) as refused:
                    await ask(kind, payload * (2 if kind is FrameType.BACKWARD else 1), **changes)
                assert refused.value.code == code
        with pytest.raises(PeerRefused, match="bad-message"):
            await ask(FrameType.BACKWARD, numbers)
        await ask(FrameType.EVALUATE, numbers)
        await ask(FrameType.BACKWARD, 2 * numbers, priority="unheard-of")
        prompted = {"extensions": {"prompts": [1, 2]}, "required": ["prompts"]}
        await ask(FrameType.EVALUATE, numbers + bytes(2 * 2 * ROW), **prompted)
        with pytest.raises(PeerRefused, match="not finite"):
            await ask(FrameType.EVALUATE, numbers + b"\xff" * 2 * 2 * ROW, **prompted)
        nothing_is_left(swarm)


@simulated
async def test_a_server_says_that_its_blocks_overflow_and_sends_no_such_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ExactExecutor, "run", lambda _self, passes: [b"\xff" * len(each.hidden) for each in passes])
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        _, connections = await router.finder.find(Span(0, 2), 0, (), hurry=False)
        (connection,) = connections.values()
        for kind, answer, copies in (
            (FrameType.EVALUATE, FrameType.EVALUATED, 1),
            (FrameType.BACKWARD, FrameType.GRADIENT, 2),
        ):
            with pytest.raises(PeerRefused, match="not finite") as refused:
                await connection.ask_peer(kind, answer, 10.0, _meta(), bytes(copies * 3 * ROW))
            assert refused.value.code == "overflow"


@simulated
async def test_a_link_has_a_few_passes_at_a_time_and_takes_them_along_when_it_ends() -> None:
    async with world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        node.worker.gate = trio.Event()
        async with swarm.client() as (router, _):
            _, connections = await router.finder.find(ALL_BLOCKS, 0, (), hurry=False)
            (connection,) = connections.values()
            refused: list[PeerRefused] = []

            async def ask() -> None:
                try:
                    meta = _meta(span_end=6)
                    await connection.ask_peer(FrameType.EVALUATE, FrameType.EVALUATED, 10.0, meta, bytes(3 * ROW))
                except PeerRefused as error:
                    refused.append(error)

            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(ask)
                await trio.sleep(1)
                assert [each.code for each in refused] == ["busy"] * 2
                assert refused[0].retry_after_s
                nursery.cancel_scope.cancel()
        await trio.sleep(1)
        node.worker.open_gate()
        await trio.sleep(1)
        nothing_is_left(swarm)


@simulated
async def test_gradients_that_are_not_finite_come_back_as_such_and_are_not_sent() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client = SwarmPasses(router.finder, Codec.RAW)
        _, crossed = await client.outputs(ALL_BLOCKS, [3], drawn(1, 3))
        forwards = sum(node.worker.executor.forwards for node in swarm.nodes.values())
        gradient = np.frombuffer(await client.gradients(crossed, np.full(3 * MODEL.hidden_size, np.inf, "<f4")), "<f4")
        assert np.isnan(gradient).all()
        assert len(gradient) == 3 * MODEL.hidden_size
        with pytest.raises(ConfigError, match="not finite"):
            await client.outputs(ALL_BLOCKS, [1], b"\xff" * ROW)
        assert forwards == sum(node.worker.executor.forwards for node in swarm.nodes.values())


@pytest.mark.parametrize("codec", Codec)
@simulated
async def test_gradients_that_are_too_large_to_compute_with_come_back_as_no_numbers(codec: Codec) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client = SwarmPasses(router.finder, codec)
        _, crossed = await client.outputs(ALL_BLOCKS, [3], drawn(1, 3))
        gradient = np.full(3 * MODEL.hidden_size, 1e18, "<f4")
        assert np.isnan(np.frombuffer(await client.gradients(crossed, gradient), "<f4")).all()


@simulated
async def test_gradients_that_overflow_at_a_server_come_back_as_no_numbers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "MOST_POSITIONS", 3)
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client, began_s = SwarmPasses(router.finder, Codec.FP16), trio.current_time()
        prompts = DeepPrompts(6, 1, 1, drawn(4, 6))
        _, crossed = await client.outputs(ALL_BLOCKS, [3, 2, 3], drawn(1, 8), prompts=prompts)
        large = np.full(3 * MODEL.hidden_size, 1e6, "<f4").tobytes()

        def overflow(_self: ExactExecutor, some: Sequence[Operation]) -> list[bytes]:
            trained = [each.prompts.size_bytes if isinstance(each, Backward) else 0 for each in some]
            return [large[: len(each.hidden)] + bytes(more) for each, more in zip(some, trained, strict=True)]

        monkeypatch.setattr(ExactExecutor, "run", overflow)
        gradient = np.ones(8 * MODEL.hidden_size, "<f4")
        found = await client.all_gradients(crossed, gradient)
        assert np.isnan(np.frombuffer(found.hidden, "<f4")).all()
        assert len(found.hidden) == gradient.nbytes
        assert np.isnan(found.prompts).all()
        assert trio.current_time() - began_s < 5


@simulated
async def test_a_server_that_answers_with_no_numbers_is_replaced() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        for name in ("0a", "1a"):
            swarm.nodes[name].network.tamper = _without_numbers
        await there_and_back(SwarmPasses(router.finder, Codec.RAW), 1, LENGTHS)


def _without_numbers(_peer: PeerId, frame: Frame) -> list[Frame]:
    is_answer = frame.type in (FrameType.EVALUATED, FrameType.GRADIENT)
    return [replace(frame, payload=b"\xff" * len(frame.payload)) if is_answer else frame]


@simulated
async def test_servers_of_before_deep_prompts_refuse_them_and_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Pass] = []
    monkeypatch.setattr(passes, "pack", lambda message: asked.append(message) or pack(message))
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        refused: list[Frame] = []

        def of_before(_peer: PeerId, frame: Frame) -> list[Frame]:
            if frame.type not in (FrameType.EVALUATED, FrameType.GRADIENT):
                return [frame]
            refused.append(refusal_of(frame, RefusalCode.UNKNOWN_EXTENSION, "prompts"))
            return refused[-1:]

        for index in range(3):
            swarm.nodes[f"{index}a"].network.tamper = of_before
        client = SwarmPasses(router.finder, Codec.RAW)
        began_s = trio.current_time()
        for seed in range(6):
            await there_and_back(client, seed, [3, 2], prompts=DeepPrompts(6, 1, 1, drawn(seed, 6)))
        assert 0 < len(refused) <= 3, "each is asked once, and not at each step"
        assert all(each.required == ["prompts"] for each in asked)
        assert trio.current_time() - began_s < 5
        for seed in range(6):
            await there_and_back(client, seed, [3, 2])
        assert len(refused) > 3, "without prompts they are asked"
