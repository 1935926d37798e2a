"""A module of your own between remote spans: it reads the hidden states after some blocks, and changes them.

python examples/between_spans.py ADDRESS1 ADDRESS2

Blocks before and after it are frozen on servers. The module learns here: a bottleneck adapter (Houlsby et al. 2019)
that makes the model end each statement with words that it would not have chosen. It prints the share of these words'
tokens that the model finds likeliest after statements that were not learned, before and after, and the losses as a
curve.
"""

import argparse
import math
import random

import torch
from rich.progress import Progress
from torch.nn.functional import cross_entropy

import llmnode

COUNTRIES = (
    "France:Paris Spain:Madrid Italy:Rome Greece:Athens Poland:Warsaw Austria:Vienna Japan:Tokyo Egypt:Cairo "
    "Cuba:Havana Peru:Lima Norway:Oslo Ireland:Dublin"
)
HELD_OUT = 4
"""The last countries are in no statement that is learned."""
ENDING = ", or so my old parrot tells me."
CURVE = "▁▂▃▄▅▆▇█"


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


class Statements:
    """Statements with the ending, padded on the right, as far as the adapter: nothing before it learns."""

    def __init__(self, model: llmnode.DistributedModelForCausalLM, countries: list[str]) -> None:
        """`countries` are some of `COUNTRIES`."""
        encode, ending = model.tokenizer.encode, model.tokenizer.encode(ENDING)
        named = [each.split(":") for each in countries]
        rows = [encode(f"The capital of {country} is {capital}") + ending for country, capital in named]
        self.ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        lengths, place = torch.tensor([len(row) for row in rows])[:, None], torch.arange(self.ids.shape[1])
        self.real = place < lengths
        self.of_ending = self.real & (place >= lengths - len(ending))
        self.middle = model.info.blocks // 2
        with torch.no_grad():
            self.before = model.remote_blocks[: self.middle](model.embed(self.ids), self.real)

    def scores(
        self, model: llmnode.DistributedModelForCausalLM, adapter: Adapter, rows: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores for the ending's tokens in these rows, each after the right ones before it, and those tokens."""
        after = model.remote_blocks[self.middle :](adapter(self.before[rows]), self.real[rows])
        wanted = self.of_ending[rows][:, 1:]
        return model.score(after)[:, :-1][wanted], self.ids[rows][:, 1:][wanted]


def curve(losses: list[float]) -> str:
    """One character for each loss: the highest one stands for the largest loss, and "x" for one that is not finite."""
    most = max((loss for loss in losses if math.isfinite(loss)), default=0.0) or 1.0
    return "".join(CURVE[int(loss / most * (len(CURVE) - 1))] if math.isfinite(loss) else "x" for loss in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="statements of a step")
    options = parser.parse_args()
    torch.manual_seed(1)
    with llmnode.connect(peers=options.peers) as model:
        countries = COUNTRIES.split()
        learned, held_out = Statements(model, countries[:-HELD_OUT]), Statements(model, countries[-HELD_OUT:])
        adapter, rng = Adapter(model.info.hidden_size), random.Random(1)
        optimizer = torch.optim.Adam(adapter.parameters(), lr=0.01)

        @torch.no_grad()
        def score() -> float:
            """The share of the ending's tokens that are likeliest after statements that are not learned."""
            scores, tokens = held_out.scores(model, adapter, [*range(HELD_OUT)])
            return float((scores.argmax(-1) == tokens).float().mean())

        baseline, losses = score(), []
        with Progress() as progress:
            task = progress.add_task("learning", total=options.steps)
            for _ in range(options.steps):
                rows = rng.sample(range(len(learned.ids)), options.batch)
                loss = cross_entropy(*learned.scores(model, adapter, rows))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
        print(f"loss {curve(losses)} {losses[-1]:.2f}")
        print(f"{score():.0%} of held-out tokens right (before: {baseline:.0%})")


if __name__ == "__main__":
    main()
