"""Gradients in lossy codecs: their size does not matter, an answer that overflows is asked for again, and checks agree.

The blocks of this file multiply gradients, so that a backward is linear, as a real one is.
"""

from __future__ import annotations

import random
from functools import partialmethod
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from llmnode.core.operations import Backward, DeepPrompts
from llmnode.core.policy import ClientPolicy, SpotCheckPolicy
from llmnode.core.span import Span
from llmnode.session.passes import SwarmPasses
from llmnode.testing.hostile import check_no_wrong_ban
from llmnode.testing.worker import ExactExecutor
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.adapters import drawn_adapter
from simulation.passes import drawn
from simulation.world import ALL_BLOCKS, MODEL, SPANS, pairs_of_servers, simulated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Pass
    from llmnode.session.passes import PassGradients
    from llmnode.wire.frame import Frame

LENGTHS = [5, 1, 12]
POSITIONS = sum(LENGTHS)
FURTHEST = {Codec.RAW: 1e-6, Codec.FP16: 1e-3, Codec.BF16: 1e-2, Codec.INT8: 0.1}
"""The relative error of a number, after some hops."""
ADAPTER = drawn_adapter(random.Random(1))
PROMPTS = DeepPrompts(MODEL.blocks, 1, 1, drawn(2, MODEL.blocks))
GRADIENT = np.random.default_rng(3).uniform(0.5, 1, POSITIONS * MODEL.hidden_size).astype("<f4")
"""Its numbers are positive, so that no sum of them cancels."""
SMALL, MEDIUM, HUGE = 2.0, 2.0**10, 2.0**14
"""Gains of a block. Two blocks with the second one make 1/4 overflow in fp16, but not 2^-7. The third one does both."""


def multiply(_executor: ExactExecutor, gain: float, backwards: list[Backward], passes: Sequence[Pass]) -> list[bytes]:
    """The gradient for each number of an adapter or prompt is the sum of the gradients for what goes into its block.

    It notes the `backwards` that are asked for.
    """
    found = []
    for each in passes:
        if not isinstance(each, Backward):
            found.append(bytes(each.hidden))
            continue
        backwards.append(each)
        gradient = np.frombuffer(each.gradient, "<f4").astype(np.float64)
        by_block = [gradient.sum() * gain ** (each.span.end - block) for block in range(each.span.start, each.span.end)]
        parts = [ADAPTER.manifest.values(Span(block, block + 1)) for block in range(each.span.start, each.span.end)]
        of_adapter = np.repeat(by_block, parts)[: each.adapter_values]
        of_prompts = np.repeat(by_block, MODEL.hidden_size)[: each.prompts.size_bytes // 4]
        own = gradient * gain ** len(each.span)
        with np.errstate(over="ignore"):
            found.append(b"".join(numbers.astype("<f4").tobytes() for numbers in (own, of_adapter, of_prompts)))
    return found


def asked(backwards: Sequence[Backward]) -> int:
    """The passes that these are parts of: each ends at the first block of a server's."""
    return sum(each.span.start in {span.start for span in SPANS} for each in backwards)


async def gradients_of(client: SwarmPasses, gradient: np.ndarray) -> PassGradients:
    _, crossed = await client.outputs(ALL_BLOCKS, LENGTHS, drawn(1, POSITIONS), ADAPTER, PROMPTS)
    return await client.all_gradients(crossed, gradient)


def numbers_of(found: PassGradients) -> list[np.ndarray]:
    return [np.frombuffer(found.hidden, "<f4"), found.adapter, found.prompts.ravel()]


def expected(gradient: np.ndarray, gain: float) -> list[np.ndarray]:
    own = gradient.astype(np.float64)
    by_block = [own.sum() * gain ** (MODEL.blocks - block) for block in range(MODEL.blocks)]
    parts = [ADAPTER.manifest.values(Span(block, block + 1)) for block in range(MODEL.blocks)]
    return [own * gain**MODEL.blocks, np.repeat(by_block, parts), np.repeat(by_block, MODEL.hidden_size)]


def are_right(found: PassGradients, gradient: np.ndarray, gain: float, codec: Codec) -> bool:
    pairs = zip(numbers_of(found), expected(gradient, gain), strict=True)
    return all((np.abs(ours - theirs) <= FURTHEST[codec] * theirs).all() for ours, theirs in pairs)


@pytest.mark.parametrize("codec", Codec)
@simulated
async def test_the_size_of_gradients_changes_no_bit_but_their_exponents(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards: list[Backward] = []
    monkeypatch.setattr(ExactExecutor, "run", partialmethod(multiply, SMALL, backwards))
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        client, usual = SwarmPasses(router.finder, codec), None
        for size in (1.0, 2.0**-60, 2.0**-27, 2.0**-20, 2.0**20, 2.0**40):
            gradient = GRADIENT * np.float32(size)
            found = await gradients_of(client, gradient)
            assert are_right(found, gradient, SMALL, codec)
            unscaled = b"".join((each / np.float32(size)).tobytes() for each in numbers_of(found))
            usual = usual or unscaled
            assert unscaled == usual
            sent = max(np.frombuffer(each.gradient, "<f4").max() for each in backwards)
            if codec is Codec.RAW:
                assert sent >= SMALL**4 * gradient.max(), "at the first of the blocks"
                assert sent <= SMALL**5 * gradient.max()
            else:
                assert 1 / 16 < sent <= SMALL / 2
            backwards.clear()


@pytest.mark.parametrize("gain", [MEDIUM, HUGE])
@simulated
async def test_an_answer_that_overflows_in_the_codec_is_asked_for_once_more_with_smaller_gradients(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards: list[Backward] = []
    monkeypatch.setattr(ExactExecutor, "run", partialmethod(multiply, gain, backwards))
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        began_s = trio.current_time()
        found = await gradients_of(SwarmPasses(router.finder, Codec.FP16), GRADIENT)
        if gain == MEDIUM:
            assert are_right(found, GRADIENT, gain, Codec.FP16)
            assert asked(backwards) == 2 * len(SPANS), "twice at each hop"
        else:
            assert all(np.isnan(each).all() for each in numbers_of(found))
        assert trio.current_time() - began_s < 5
        check_no_wrong_ban(router.finder, [node.peer for node in swarm.nodes.values()])  # type: ignore[arg-type]


@pytest.mark.parametrize("gain", [SMALL, MEDIUM])
@simulated
async def test_a_check_computes_with_the_scale_of_the_answer_and_honest_servers_agree(
    gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards: list[Backward] = []
    monkeypatch.setattr(ExactExecutor, "run", partialmethod(multiply, gain, backwards))
    policy = ClientPolicy(spot_checks=SpotCheckPolicy(share=1.0, tolerance=0.0))
    async with pairs_of_servers() as swarm, swarm.client(policy) as (router, _):
        client = SwarmPasses(router.finder, Codec.FP16)
        assert are_right(await gradients_of(client, GRADIENT * np.float32(1e-8)), GRADIENT * 1e-8, gain, Codec.FP16)
        checks = client.checks
        assert (checks.passed, checks.given_up, checks.undecided, checks.found) == (2 * len(SPANS), 0, 0, [])
        assert asked(backwards) == (2 if gain == SMALL else 3) * len(SPANS), "the check tries no other scale"


@simulated
async def test_a_server_that_says_so_of_gradients_that_others_can_compute_spoils_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ExactExecutor, "run", partialmethod(multiply, SMALL, []))
    refused = 0

    def claims_overflow(_peer: PeerId, frame: Frame) -> list[Frame]:
        nonlocal refused
        if frame.type is not FrameType.GRADIENT:
            return [frame]
        refused += 1
        return [refusal_of(frame, RefusalCode.OVERFLOW, "numbers that are not finite")]

    async with pairs_of_servers() as swarm:
        liar = await swarm.start("liar", ALL_BLOCKS, said_us=1)
        liar.network.tamper = claims_overflow
        async with swarm.client() as (router, _):
            client = SwarmPasses(router.finder, Codec.FP16)
            began_s = trio.current_time()
            assert are_right(await gradients_of(client, GRADIENT), GRADIENT, SMALL, Codec.FP16)
            assert refused
            assert trio.current_time() - began_s < 5
