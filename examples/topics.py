"""Learn to tell topics apart: a soft prompt and a head here, a frozen model on the servers whose addresses are given.

python examples/topics.py ADDRESS1 ADDRESS2
python examples/topics.py --plot loss.png --save topics ADDRESS1 ADDRESS2

Prompt tuning (Lester et al. 2021) by PEFT, which alone loads what `--save` writes. It prints the share of held-out
sentences whose topic is right; a guess is right for a quarter of them. No word that tells the topic of a held-out
sentence is in a sentence that was learned.
"""

import argparse
import random
from typing import Any

import peft
import torch
from rich.progress import Progress

import llmnode

WORDS = {
    "food": "bread soup apples rice honey pasta salad cake beans sausages cheese butter pizza lemons",
    "sport": "football tennis hockey rugby boxing cycling golf rowing skiing baseball swimming volleyball judo cricket",
    "weather": "rain snow wind fog thunder sunshine hail clouds frost drizzle storms lightning mist showers",
    "money": "taxes loans interest savings rent prices wages debts profits credit pensions banks budgets fees",
}
HELD_OUT = 4
"""The last words of each topic are in no sentence that is learned."""
FRAMES = ("We talked about {}", "There was news of {}", "My uncle loves {}", "She wrote about {}")
VIRTUAL_TOKENS = 8


def sentences(*, held_out: bool) -> list[tuple[str, int]]:
    """Sentences, each with the number of its topic."""
    words = [each.split() for each in WORDS.values()]
    chosen = [each[-HELD_OUT:] if held_out else each[:-HELD_OUT] for each in words]
    return [(frame.format(word), topic) for topic, some in enumerate(chosen) for word in some for frame in FRAMES]


class Topics:
    """A classifier that learns. `base` is a distributed model."""

    def __init__(self, base: llmnode.DistributedModelForCausalLM, batch: int) -> None:
        self.tokenizer = base.tokenizer.loaded
        self.padding = self.tokenizer.pad_token_id or 0
        head = base.with_head("sequence-classification", num_labels=len(WORDS), pad_token_id=self.padding)
        config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=VIRTUAL_TOKENS)
        self.model = peft.get_peft_model(head, config)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.02)
        self.batch = batch

    def learn(self, steps: int, rng: random.Random) -> list[float]:
        """The loss of each step."""
        examples, losses = sentences(held_out=False), []
        self.model.train()
        with Progress() as progress:
            task = progress.add_task("learning", total=steps)
            for _ in range(steps):
                loss = sum(self._loss(group) for group in self._of_one_length(rng.sample(examples, self.batch)))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
                progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
        return losses

    @torch.no_grad()
    def score(self) -> float:
        """The share of held-out sentences whose topic is right."""
        self.model.eval()
        examples = sentences(held_out=True)
        right = 0
        for group in self._of_one_length(examples):
            scores = self.model(input_ids=self._ids(group)).logits
            right += int((scores.argmax(dim=1) == torch.tensor([topic for _, topic in group])).sum())
        return right / len(examples)

    def _loss(self, group: list[tuple[str, int]]) -> torch.Tensor:
        labels = torch.tensor([topic for _, topic in group])
        loss: torch.Tensor = self.model(input_ids=self._ids(group), labels=labels).loss
        return loss * len(group) / self.batch

    def _ids(self, group: list[tuple[str, int]]) -> torch.Tensor:
        return torch.tensor([self.tokenizer(text).input_ids for text, _ in group])

    def _of_one_length(self, examples: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
        """So that nothing is padded: PEFT gives the head embeddings, which do not tell padding from text."""
        groups: dict[int, list[tuple[str, int]]] = {}
        for example in examples:
            groups.setdefault(len(self.tokenizer(example[0]).input_ids), []).append(example)
        return list(groups.values())


def plot(losses: list[float], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes: Any = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="sentences of a step")
    parser.add_argument("--plot", metavar="FILE", help="write the losses as a picture, by matplotlib")
    parser.add_argument("--save", metavar="FOLDER", help="write the prompt and the head in PEFT's format")
    options = parser.parse_args()
    torch.manual_seed(1)
    with llmnode.connect(peers=options.peers) as base:
        topics = Topics(base, options.batch)
        losses = topics.learn(options.steps, random.Random(1))
        print(f"held-out sentences right: {topics.score():.0%} (a guess: {1 / len(WORDS):.0%})")
        if options.plot:
            plot(losses, options.plot)
        if options.save:
            topics.model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
