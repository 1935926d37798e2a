"""Clients of servers that have KV for five of their sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.core.policy import AdmissionPolicy, ClientPolicy, RoutePolicy, ServePolicy
from llmnode.testing import Conditions, open_world
from llmnode.wire.payload import Codec
from simulation.world import DELAY_S, KV_TOKENS

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AsyncExitStack

    from llmnode.session.session import InferenceSession
    from llmnode.testing import World
    from llmnode.testing.world import SimulatedClient

FIFTH = KV_TOKENS // 5
PATIENT = ClientPolicy(chunk_tokens=8, route=RoutePolicy(kv_patience_s=600))
IMPATIENT = replace(PATIENT, route=RoutePolicy(kv_patience_s=0))


def world(seed: int = 0) -> AbstractAsyncContextManager[World]:
    """Sessions that only hold KV count as those that have computed."""
    admission = AdmissionPolicy(unused_s=AdmissionPolicy().idle_s)
    return open_world(seed, conditions=Conditions(delay_s=DELAY_S), serve_policy=ServePolicy(admission=admission))


async def fill(stack: AsyncExitStack, client: SimulatedClient, sessions: int = 5) -> list[InferenceSession]:
    """Sessions of a fifth each; the servers have no more KV after five."""
    opening = [client.router.open_session(FIFTH, Codec.RAW) for _ in range(sessions)]
    return [await stack.enter_async_context(each) for each in opening]
