"""Generate text through the servers whose addresses are given, with all that transformers' `generate` can do.

llmnode serve --blocks 0:15        (prints ADDRESS1)
llmnode serve --blocks 15:30       (prints ADDRESS2)
python examples/generate.py ADDRESS1 ADDRESS2
"""

import argparse

import torch

import llmnode
from llmnode.core.texts.visible import visible  # a hostile server can choose escape sequences


def main(peers: list[str]) -> None:
    with llmnode.connect(peers=peers) as model:
        prompt = torch.tensor([model.tokenizer.encode("The capital of France is")])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        print(visible(model.tokenizer.decode(output[0].tolist())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    main(parser.parse_args().peers)
