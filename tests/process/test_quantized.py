"""Servers with weights or KV of 8 bits, beside others of their model: an answer comes from servers of one precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from bench.kit.decoding import load_in
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.model import PRECISIONS
from llmnode.core.operations import Close, Open, Slice
from llmnode.core.policy import ClientPolicy, RecoveryPolicy
from llmnode.core.span import Span
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.session.recompute import tolerance
from llmnode.wire.payload import Codec
from reference.small import session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.client.connect import ClientParts
    from llmnode.compute.executor import SpanExecutor
    from llmnode.session.session import InferenceSession

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = ("The three laws of thermodynamics are", "def fibonacci(n):", "1, 2, 3, 4,")
NEW_TOKENS = 16
FP32_BLOCK_BYTES = 4 * (4 * 576 * 384 + 3 * 576 * 1536)
OPTIONS = {"float32+int8": ("--quant", "int8"), "float32+kv-int8": ("--kv-dtype", "int8")}
DEADLINE_S = 180
"""A server starts within it."""


@dataclass
class Whole:
    """The model in `dtype` in this process."""

    dtype: str
    parts: ClientParts
    executor: SpanExecutor

    def run(self, chunks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The output of the blocks for each chunk of a sequence: (tokens, hidden_size)."""
        start, made = 0, []
        assert self.executor.apply(Open(session(1), self.executor.span, sum(map(len, chunks))))
        for chunk in chunks:
            hidden = self.parts.ends.embed(list(chunk), start)
            (output,) = self.executor.forward([Slice(session(1), start, len(chunk), to_bytes(hidden))])
            made.append(from_bytes(output, self.parts.model.hidden_size))
            start += len(chunk)
        self.executor.apply(Close(session(1)))
        return made

    def apart(self, answer: Greedy) -> torch.Tensor:
        """How far each position of the answer is from what the model makes of the same chunks: relative L2 errors."""
        ours, theirs = torch.cat(self.run(answer.given)), torch.cat(answer.outputs)
        return (ours - theirs).norm(dim=1) / ours.norm(dim=1)

    @property
    def apart_at_most(self) -> float:
        """Products of integers are exact; KV that is half-way between two steps goes to either by the last bit."""
        return 0.0 if "--quant" in OPTIONS[self.dtype] else tolerance(PRECISIONS[self.dtype], Codec.RAW)


@dataclass
class Greedy:
    """Chooses tokens over a session, and keeps what it was given and what came back."""

    parts: ClientParts
    session: InferenceSession
    chunks: list[list[int]]
    outputs: list[torch.Tensor]

    async def choose(self, steps: int) -> None:
        for _ in range(steps):
            chunk = self.chunks[len(self.outputs)]
            output = await self.session.step(to_bytes(self.parts.ends.embed(chunk, self.session.position)))
            self.outputs.append(from_bytes(output, self.parts.model.hidden_size))
            self.chunks.append([int(self.parts.ends.logits(self.outputs[-1][-1:]).argmax())])

    @property
    def given(self) -> list[list[int]]:
        return self.chunks[: len(self.outputs)]


@pytest.fixture(scope="module", params=OPTIONS)
def whole(request: pytest.FixtureRequest, folder: Any) -> Whole:
    torch.set_num_threads(1)
    return Whole(request.param, load_parts(folder), load_in(request.param, folder, Span(0, 30), 1000))


@pytest.fixture(scope="module")
def servers(start_servers: Callable[..., list[Any]], whole: Whole) -> list[Any]:
    """One server has all blocks without quantization, and all others know its address; two have that precision."""
    (plain,) = start_servers([Span(0, 30)])
    options = OPTIONS[whole.dtype]
    return [plain, *start_servers([Span(0, 11), Span(11, 30)], peers=[plain.address], more=options)]


def test_each_client_gets_the_servers_of_its_precision_and_the_output_of_their_blocks(
    servers: list[Any], whole: Whole
) -> None:
    seed = [servers[0].address]
    assert [each.ready["dtype"] for each in servers] == ["float32", whole.dtype, whole.dtype]
    if "--quant" in OPTIONS[whole.dtype]:
        assert servers[2].ready["tensor_bytes"] < 0.26 * 19 * FP32_BLOCK_BYTES

    async def ask(dtype: str) -> list[Greedy]:
        answers = []
        with trio.fail_after(DEADLINE_S):
            async with aconnect(seed, parts=whole.parts, dtype=dtype) as client:
                for text in PROMPTS:
                    async with client.inference_session(64) as hops:
                        answers.append(Greedy(whole.parts, hops, [whole.parts.tokenizer.encode(text)], []))
                        await answers[-1].choose(NEW_TOKENS)
                held = {each.peer: each.offer.profile.precision.name for each in client.swarm.view.announcements()}
                assert {held[hop.peer] for hop in client.route} == {dtype}
                assert len(set(held.values())) == 2
        return answers

    for answer in trio.run(ask, whole.dtype):
        assert whole.apart(answer).max() <= whole.apart_at_most
    for answer in trio.run(ask, "float32"):
        assert whole.apart(answer).min() > 0


def test_nobody_of_another_precision_takes_the_place_of_a_lost_server(
    start_servers: Callable[..., list[Any]], servers: list[Any], whole: Whole
) -> None:
    plain, first, lost = servers
    seed = [plain.address]
    policy = ClientPolicy(recovery=RecoveryPolicy(timeout_s=DEADLINE_S))

    async def ask() -> Greedy:
        with trio.fail_after(DEADLINE_S):
            async with (
                aconnect(seed, parts=whole.parts, dtype=whole.dtype, policy=policy) as client,
                client.inference_session(64) as hops,
            ):
                answer = Greedy(whole.parts, hops, [whole.parts.tokenizer.encode(PROMPTS[0])], [])
                await answer.choose(4)
                assert [hop.peer for hop in hops.route] == [first.ready["peer"], lost.ready["peer"]]
                lost.process.kill()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(answer.choose, 4)  # waits, though the plain one is there all the time
                    start = partial(start_servers, [Span(9, 30)], peers=seed, more=OPTIONS[whole.dtype])
                    (twin,) = await trio.to_thread.run_sync(start)
                assert [hop.peer for hop in hops.route] == [first.ready["peer"], twin.ready["peer"]]
        return answer

    answer = trio.run(ask)
    assert len(answer.outputs) == 8
    apart = whole.apart(answer)
    assert apart[:-4].max() <= whole.apart_at_most
    assert apart.max() < tolerance(PRECISIONS[whole.dtype], Codec.RAW)  # computed by the twin in one prefill
