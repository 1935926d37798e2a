"""Answers to several questions at once, streamed from a trio program, each ended by a stop string or its length.

python examples/streaming_chat.py ADDRESS1 ADDRESS2
python examples/streaming_chat.py ADDRESS --ask "What is the capital of France?" "Why is the sky blue?"
"""

import argparse

import trio

import llmnode
from llmnode.core.texts.visible import visible  # a hostile server can choose escape sequences

QUESTIONS = ["What is the capital of France?", "Why is the sky blue?"]


async def answer(client: llmnode.Client, question: str) -> None:
    prompt = client.tokenizer.encode_dialogue([("user", question)])
    sampling = llmnode.Sampling(temperature=0, settings={"stop_strings": ["\n\n"]})
    text = ""
    async with client.generate(prompt, max_new_tokens=48, sampling=sampling) as tokens:
        async for token in tokens:  # a break here, or a timeout around it, would end the session at once
            text += token.text
            if token.finish is not None:
                usage = token.finish.usage
                print(f"{question}\n{visible(text)}\n({usage.new_tokens} tokens, {token.finish.reason})", flush=True)


async def main(questions: list[str], peers: list[str]) -> None:
    async with llmnode.aconnect(peers) as client, trio.open_nursery() as nursery:
        for question in questions:
            nursery.start_soon(answer, client, question)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    parser.add_argument("--ask", nargs="+", metavar="QUESTION", default=QUESTIONS, help=f"(default: {QUESTIONS})")
    options = parser.parse_args()
    # Ctrl-C then never comes in the middle of what trio notes for itself, after which a program may not end.
    trio.run(main, options.ask, options.peers, restrict_keyboard_interrupt_to_checkpoints=True)
