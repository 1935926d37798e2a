"""Tries how fast a server puts tokens through its span, as any client could: placement believes no more of its word.

A short session computes some positions at once, twice. A round trip, and the time that our own line needs to send them,
are taken off. Nobody looks at the results: a server that answers something else in time is found by spot checks.
"""

from __future__ import annotations

import logging
import math
import random
from array import array
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import Epoch, Step
from llmnode.core.policy import ClientPolicy, ProbePolicy
from llmnode.core.route import Hop
from llmnode.errors import PeerError, PeerTimeout, single_error
from llmnode.session.chunk_run import run_chunk
from llmnode.session.hop import SessionHop
from llmnode.swarm.probing import measure_round_trip
from llmnode.wire.chunk import Chunk
from llmnode.wire.payload import Codec
from llmnode.wire.session_state import SessionState
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    from llmnode.core.announcement import Announcement
    from llmnode.core.model import ModelInfo
    from llmnode.swarm.peer_connection import PeerConnection

log = logging.getLogger(__name__)

LEAST, MOST = 8, 64
"""Positions that are computed at once."""
LASTS_S = 0.5
"""The positions take this long at the speed that the server claims, if they are within these limits."""
RUNS = 2
"""The fastest run counts: the server may be busy with others."""
WITHIN_S = 10.0
"""A trial is over after this time: what is not computed by then counts as if it had just ended."""
TRIP_S = 0.5
"""No round trip is taken to be longer than this. A slow server would gain by answering pings late."""
CLOSES_WITHIN_S = 2.0


async def try_pace(
    connection: PeerConnection, announced: Announcement, model: ModelInfo, upload_bytes_per_s: float
) -> float | None:
    """The tokens a second that a server has shown, or None if it takes no session.

    `upload_bytes_per_s` is the speed of our own line. The result is infinite if that took all the time.
    """
    positions = round(LASTS_S * (announced.offer.speed.tokens_per_s or announced.offer.speed_tokens_per_s))
    positions = min(max(positions, LEAST), MOST)
    terms = SessionTerms(model, RUNS * positions, Codec.RAW, ClientPolicy())
    hop = SessionHop(Hop(announced.peer, announced.offer.span), connection, terms)
    beside_s = positions * model.row_bytes / upload_bytes_per_s
    took_s: list[float] = []
    began_s = trio.current_time()
    try:
        with trio.fail_after(WITHIN_S), single_error():
            beside_s += min(TRIP_S, await measure_round_trip(connection.best, ProbePolicy()))
            for each, requests in SessionState[SessionHop](terms).open([hop], [None], began_s):
                await each.carry_out(*requests)
            for step in range(RUNS):
                began_s = trio.current_time()
                await _compute(hop, terms, step, positions)
                took_s.append(trio.current_time() - began_s)
    except (trio.TooSlowError, PeerTimeout):
        took_s.append(trio.current_time() - began_s)
    except PeerError as error:
        log.debug("no trial of its pace peer=%s: %s", announced.peer, error)
        return None
    finally:
        with trio.move_on_after(CLOSES_WITHIN_S, shield=True):
            await hop.close()
    computing_s = min(took_s) - beside_s
    return positions / computing_s if computing_s > 0.0 else math.inf


async def _compute(hop: SessionHop, terms: SessionTerms, step: int, length: int) -> None:
    """One noise for all positions: a server cannot have the answer ready."""
    noise = array("f", [random.gauss(0.0, 0.1) for _ in range(terms.model.hidden_size)]).tobytes()
    payload = bytes(terms.form.encode(length * noise))
    await run_chunk([hop], Chunk(Epoch(0), Step(step), step * length, length), payload, terms.policy)
