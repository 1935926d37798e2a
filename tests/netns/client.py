"""A client that generates what stdin asks for, torch imported once: `client.py`, with a line of JSON for each session.

A request names `peers`, `prompt` (token ids) and `new_tokens`. It prints lines of JSON, too: "ready"; then "opened"
with the hops, each "token" as it is chosen, and "done", or "failed" at any time. Each session has a network, and an
identity, of its own. It ends with stdin.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
import trio

from llmnode.client.connect import aconnect, load_parts
from llmnode.errors import LlmnodeError

if TYPE_CHECKING:
    from llmnode.client.connect import ClientParts


def say(event: str, **said: Any) -> None:  # Any: JSON
    print(json.dumps({"event": event, **said}), flush=True)


async def generate(parts: ClientParts, asked: dict[str, Any]) -> None:
    prompt, new_tokens = asked["prompt"], asked["new_tokens"]
    async with (
        aconnect(asked["peers"], parts=parts) as client,
        client.inference_session(len(prompt) + new_tokens) as session,
    ):
        say("opened", peers=[hop.peer for hop in session.route])
        made = []
        async for token in client.generate(prompt, new_tokens, stop_at_eos=False, session=session):
            say("token", token=token.id)
            made.append(token)
        say(
            "done",
            token_ids=[token.id for token in made],
            pushed=any(all(hop.direct for hop in timing.hops[1:]) for timing in (token.timing for token in made)),
            recoveries=[
                {"lost": each.lost, "cause": each.cause, "stall_s": each.stall_s} for each in session.recoveries
            ],
        )


def main() -> None:
    torch.set_num_threads(1)
    parts = load_parts()
    say("ready")
    for line in sys.stdin:
        try:
            trio.run(generate, parts, json.loads(line))
        except LlmnodeError as error:
            say("failed", error=str(error))


if __name__ == "__main__":
    main()
