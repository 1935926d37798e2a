"""Getting into a swarm: named peers are asked all at once, and peers of former runs if none of them answers.

Nobody waits long for a peer that is silent once another has answered. It opens no connection itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import trio

from llmnode.core.policy import JoinPolicy
from llmnode.errors import ConfigError, PeerError

Addresses: TypeAlias = Sequence[str]
"""Those of one peer."""
Meet: TypeAlias = Callable[[Addresses], Awaitable[None]]
"""Exchanges views with a peer. Raises PeerError, or ConfigError for a malformed address."""
StartSoon: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""Runs a task that may outlive the call, and that raises nothing."""


@dataclass(slots=True)
class _Answers:
    """How the attempts went until now."""

    met: set[int] = field(default_factory=set)
    open: int = 0
    errors: dict[int, PeerError | ConfigError] = field(default_factory=dict)
    """By the number of the attempt, as those that it has `met`."""
    changed: trio.Event = field(default_factory=trio.Event)

    def note_change(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


async def enter(
    meet: Meet,
    start_soon: StartSoon,
    named: Sequence[Addresses],
    former: Sequence[Addresses] = (),
    policy: JoinPolicy | None = None,
) -> bool:
    """Meet the `named` peers; if none of them answers soon, some of the `former` ones beside them, and then more.

    Returns a moment after the first answer, when those that are still silent go on in tasks of `start_soon`. False if
    only former peers have answered. Raises the error of the first named peer if nobody answers, and ConfigError at once
    for a malformed address that is named.
    """
    policy, began_s = policy or JoinPolicy(), trio.current_time()
    answers, left = _Answers(), list(former)

    async def attempt(number: int, addresses: Addresses) -> None:
        try:
            await meet(addresses)
            answers.met.add(number)
        except (PeerError, ConfigError) as error:
            answers.errors[number] = error
        finally:
            answers.open -= 1
            answers.note_change()

    def begin(peers: Sequence[Addresses], first_number: int) -> None:
        for number, addresses in enumerate(peers, first_number):
            answers.open += 1
            start_soon(partial(attempt, number, addresses))

    begin(named, 0)
    began = len(named)
    while answers.open or left:
        with trio.move_on_after(policy.former_after_s if left else float("inf")):
            while answers.open and not answers.met:
                await answers.changed.wait()
                _raise_malformed(answers, len(named))
        if answers.met:
            break
        batch, left = left[: policy.former_at_once], left[policy.former_at_once :]
        begin(batch, began)
        began += len(batch)
    _raise_malformed(answers, len(named))
    is_named_there = not named or min(answers.met, default=0) < len(named)
    took_s = trio.current_time() - began_s
    with trio.move_on_after(policy.moment_s + took_s if is_named_there else policy.former_moment_s):
        while answers.open:
            await answers.changed.wait()
    _raise_malformed(answers, len(named))
    if named and not answers.met:
        raise answers.errors[0]
    return is_named_there


def _raise_malformed(answers: _Answers, named: int) -> None:
    for number in range(named):
        if isinstance(error := answers.errors.get(number), ConfigError):
            raise error
