"""One chunk of hidden states on its way through all hops of a session."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.errors import IntegrityError, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.hop import Chunk, ExpectedOutput, HopOutput, HopTiming, SessionHop
    from llmnode.core.policy import ClientPolicy
    from llmnode.wire.frame import Buffer


@dataclass(frozen=True, slots=True)
class Flight:
    """A chunk that has passed all hops: what each was given, and what the last put out."""

    chunk: Chunk
    inputs: Sequence[Buffer]
    output: Buffer
    timings: Sequence[HopTiming]


async def fly(
    hops: Sequence[SessionHop],
    chunk: Chunk,
    payload: Buffer,
    policy: ClientPolicy,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> Flight:
    """Give the first hop its input, and each further one that the hop before does not give it. Checks every output.

    Started once the first hop has its input. Raises a PeerError, which is the `failure` of its hop.
    """
    inputs: list[Buffer] = []
    timings: list[HopTiming] = []
    with ExitStack() as stack:
        expected = [stack.enter_context(hop.expect(chunk)) for hop in hops]
        before: HopOutput | None = None
        for number, (hop, output) in enumerate(zip(hops, expected, strict=True)):
            inputs.append(payload)
            with hop.blamed():
                if before is None or not before.pushed:
                    await output.give(payload)
                    before = None
                if number == 0:
                    task_status.started()
                arrived = await _receive(output, payload, before, hops[number - 1], policy)
            timings.append(arrived.timing)
            payload, before = arrived.payload, arrived
    return Flight(chunk, inputs, payload, timings)


async def _receive(
    output: ExpectedOutput, payload: Buffer, before: HopOutput | None, pusher: SessionHop, policy: ClientPolicy
) -> HopOutput:
    """What a hop puts out for `payload`, which the hop `before` says it has been given, if there is one."""
    if before is None:
        return await output.receive(payload, policy.step_timeout_s)
    upstream_us = before.timing.queue_us + before.timing.compute_us
    try:
        return await output.receive(payload, policy.push_patience_s + 4 * upstream_us / 1e6)
    except IntegrityError:  # which of the two lies is not known
        pusher.may_push = False
        raise
    except PeerTimeout:  # it may be slow, or the push got lost: it is safe to give it the same again
        pusher.may_push = False
        await output.give(payload)
    return await output.receive(payload, policy.step_timeout_s)
