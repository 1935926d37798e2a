"""A module of your own between remote spans: it reads the hidden states after some blocks, and changes them.

python examples/between_spans.py ADDRESS1 ADDRESS2

Blocks before and after it are frozen on servers. The module learns here: a bottleneck adapter (Houlsby et al. 2019)
that makes the model go on with a sentence which it would not have chosen.
"""

import argparse

import torch
from rich.progress import Progress
from torch.nn.functional import cross_entropy

import llmnode

TEXT = "The capital of France is"
TARGET = " Berlin, of course."


class Adapter(torch.nn.Module):
    """Changes nothing at first."""

    def __init__(self, size: int, inner: int = 16) -> None:
        super().__init__()
        self.down = torch.nn.Linear(size, inner)
        self.up = torch.nn.Linear(inner, size)
        torch.nn.init.zeros_(self.up.weight)
        torch.nn.init.zeros_(self.up.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.up(torch.nn.functional.gelu(self.down(hidden)))
        return hidden + changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(1)
    with llmnode.connect(peers=options.peers) as model:
        tokens = model.tokenizer.encode(TEXT)
        ids = torch.tensor([tokens + model.tokenizer.encode(TARGET)])
        blocks, middle = model.remote_blocks, model.info.blocks // 2
        adapter = Adapter(model.info.hidden_size)
        optimizer = torch.optim.Adam(adapter.parameters(), lr=0.01)
        before = blocks[:middle](model.embed(ids)).detach()  # nothing before the adapter learns: it is computed once

        def likelihood() -> torch.Tensor:
            """The mean log-likelihood of the target's tokens."""
            scores = model.score(blocks[middle:](adapter(before)))
            return -cross_entropy(scores[0, len(tokens) - 1 : -1], ids[0, len(tokens) :])

        first = likelihood().item()
        with Progress() as progress:
            task = progress.add_task("learning", total=options.steps)
            for _ in range(options.steps):
                loss = -likelihood()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
        print(f"log-likelihood of {TARGET!r} after {TEXT!r}: {likelihood().item():.2f} (before: {first:.2f})")


if __name__ == "__main__":
    main()
