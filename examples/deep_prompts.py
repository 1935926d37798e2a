"""Learn the style of a corpus by deep prompts (P-tuning v2): trained here, and added before each block on the servers.

python examples/deep_prompts.py ADDRESS1 ADDRESS2
python examples/deep_prompts.py --corpus FILE --save prompts ADDRESS1 ADDRESS2

The corpus has a text in each line; without one it is made up. It prints the losses as a curve, the loss on lines
that were not learned, before and after, and a text in the new style.
"""

import argparse
import math
import random
from pathlib import Path

import torch
from rich.progress import Progress

import llmnode

IGNORED = -100
"""The label of padding."""
CURVE = "▁▂▃▄▅▆▇█"


def ship_log() -> list[str]:
    """Lines of one style, in random order."""
    rng = random.Random(1)
    winds, seas = ("north", "east", "south", "west"), ("calm", "rough", "high", "smooth")

    def line() -> str:
        day, wind, sea, sails = rng.randint(1, 90), rng.choice(winds), rng.choice(seas), rng.randint(0, 9)
        return f"Day {day}: wind {wind}, sea {sea}, {sails} sails in sight."

    return [line() for _ in range(64)]


class Corpus:
    """Lines as batches of tokens. The last quarter is held out."""

    def __init__(self, lines: list[str], model: llmnode.DistributedModelForCausalLM, most_tokens: int = 64) -> None:
        texts = [model.tokenizer.encode(line)[:most_tokens] for line in lines]
        texts = [text for text in texts if len(text) > 1]
        edge = max(1, len(texts) * 3 // 4)
        self.learned, self.held_out = texts[:edge], texts[edge:] or texts[-1:]

    @staticmethod
    def batch(texts: list[list[int]]) -> dict[str, torch.Tensor]:
        """Padded on the right: `input_ids`, `attention_mask` and `labels`, each (texts, tokens)."""
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def curve(losses: list[float]) -> str:
    """One character for each loss: the highest one stands for the largest loss, and "x" for one that is not finite."""
    most = max((loss for loss in losses if math.isfinite(loss)), default=0.0) or 1.0
    return "".join(CURVE[int(loss / most * (len(CURVE) - 1))] if math.isfinite(loss) else "x" for loss in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    parser.add_argument("--corpus", metavar="FILE", type=Path, help="a text in each line")
    parser.add_argument("--prompts", type=int, default=4, help="positions before every text")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="lines of a step")
    parser.add_argument("--new-tokens", type=int, default=24, help="length of the text")
    parser.add_argument("--save", metavar="FOLDER", help="write the prompts as safetensors")
    options = parser.parse_args()
    lines = options.corpus.read_text(encoding="utf-8").splitlines() if options.corpus else ship_log()
    torch.manual_seed(1)
    with llmnode.connect(peers=options.peers) as model:
        model.tune_prompts("deep_ptune", options.prompts)
        corpus, rng = Corpus(lines, model), random.Random(1)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.02)

        @torch.no_grad()
        def loss() -> float:
            """The loss on some lines that are not learned."""
            return float(model(**corpus.batch(corpus.held_out[: options.batch])).loss)

        before, losses = loss(), []
        with Progress() as progress:
            task = progress.add_task("learning", total=options.steps)
            for _ in range(options.steps):
                texts = rng.sample(corpus.learned, min(options.batch, len(corpus.learned)))
                found = model(**corpus.batch(texts)).loss
                optimizer.zero_grad()
                found.backward()
                optimizer.step()
                losses.append(found.item())
                progress.update(task, advance=1, description=f"loss {found.item():.3f}")
        print(f"loss {curve(losses)} {losses[-1]:.2f}")
        print(f"loss on held-out lines: {loss():.2f} (before: {before:.2f})")
        start = torch.tensor([corpus.held_out[0][:3]])
        mask, most = torch.ones_like(start), options.new_tokens
        text = model.generate(start, attention_mask=mask, max_new_tokens=most, do_sample=False)
        print(model.tokenizer.loaded.decode(text[0]).splitlines()[0])
        if options.save:
            model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
