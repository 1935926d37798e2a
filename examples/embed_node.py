"""An app that serves blocks while it runs, and uses the swarm that it is a part of.

    python examples/embed_node.py [ADDRESS...]

Without an address it starts a swarm of its own; with one it joins that swarm and serves what is needed there most.
"""

import argparse
import sys

import torch

import llmnode
from llmnode.core.texts.visible import visible  # a hostile server can choose escape sequences
from llmnode.node import Node


def main(peers: list[str]) -> None:
    with Node(blocks="auto", peers=peers, threads=1) as node:
        print(f"serving blocks {node.blocks} at {' '.join(node.addresses)}", file=sys.stderr)
        with llmnode.connect(peers=node.addresses) as model:
            prompt = torch.tensor([model.tokenizer.encode("Once upon a time")])
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
            print(visible(model.tokenizer.decode(output[0].tolist())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="ADDRESS")
    main(parser.parse_args().peers)
