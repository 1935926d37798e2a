"""One answer of a chat, streamed from a trio program.

python examples/streaming_chat.py "Why is the sky blue?" ADDRESS1 ADDRESS2
"""

import sys

import trio

import llmnode


async def main(question: str, peers: list[str]) -> None:
    async with llmnode.aconnect(peers) as client:
        prompt = client.tokenizer.encode_dialogue([("user", question)])

        def show(token: int) -> None:
            print(client.tokenizer.decode([token]), end="", flush=True)

        await client.generate(prompt, max_new_tokens=48, on_token=show)
        print()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2:])
