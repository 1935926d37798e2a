"""The async token loop through real servers: however a text is left, its KV is free again while its client goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode import Sampling
from llmnode.client.connect import aconnect
from process.described import described

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.connect import Client

pytestmark = [pytest.mark.process, pytest.mark.slow]

FREE_WITHIN_S = 10.0


async def leave(client: Client, prompt: list[int], how: str) -> None:
    """Leave in the middle of an answer."""
    came = 0
    with trio.CancelScope() as scope:
        async with client.generate(prompt, stop_at_eos=False) as answer:
            async for _ in answer:
                came += 1
                if came == 3 and how == "break":
                    break
                if came == 3:
                    scope.cancel()  # the next step finds out
    assert came == 3
    assert scope.cancelled_caught == (how == "cancel")


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_kv_is_free_at_once_when_a_loop_is_left(how: str, peers: list[str]) -> None:
    free = [each.kv_tokens_free for each in described(peers)]

    async def use() -> None:
        async with aconnect(peers) as client:
            await leave(client, client.tokenizer.encode("Write a very long story about the sea."), how)
            with trio.fail_after(FREE_WITHIN_S):
                while await trio.to_thread.run_sync(free_of, peers) != free:
                    pass
            assert (await client.generate(client.tokenizer.encode("1, 2, 3,"), 4)).text

    trio.run(use)


def free_of(peers: Sequence[str]) -> list[int]:
    return [each.kv_tokens_free for each in described(peers)]


def test_many_texts_at_once_are_those_of_one_after_another(peers: list[str]) -> None:
    prompts = [f"{number}, {number + 1}, {number + 2}," for number in range(12)]
    settings: dict[str, Any] = {"repetition_penalty": 1.1, "stop_strings": ["9"]}
    sampling = Sampling(temperature=0.8, seed=4, settings=settings)
    texts: dict[tuple[bool, int], str] = {}

    async def use() -> None:
        async with aconnect(peers) as client:

            async def generate(number: int, *, is_alone: bool) -> None:
                prompt = client.tokenizer.encode(prompts[number])
                answer = client.generate(prompt, 12, sampling=sampling, number=number)
                texts[is_alone, number] = (await answer).text

            for number in range(len(prompts)):
                await generate(number, is_alone=True)
            async with trio.open_nursery() as nursery:
                for number in range(len(prompts)):
                    nursery.start_soon(lambda number=number: generate(number, is_alone=False))

    trio.run(use)
    assert [texts[True, number] for number in range(12)] == [texts[False, number] for number in range(12)]
    assert not any("9" in text for text in texts.values())
