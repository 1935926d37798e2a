"""One answer of a chat, streamed from a trio program.

python examples/streaming_chat.py "Why is the sky blue?" ADDRESS1 ADDRESS2
"""

import sys

import trio

import llmnode
from llmnode.models.text.streaming import TextStream


async def main(question: str, peers: list[str]) -> None:
    async with llmnode.aconnect(peers) as client:
        prompt = client.tokenizer.encode_dialogue([("user", question)])
        stream = TextStream(client.tokenizer, prompt)

        def show(token: int) -> None:
            print(stream.add(token), end="", flush=True)

        await client.generate(prompt, max_new_tokens=48, on_token=show)
        print(stream.finish())


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2:])
