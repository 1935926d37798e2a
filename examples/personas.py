"""Two personas learn at once on the same servers: each client has a LoRA adapter of its own. Then chat with both.

python examples/personas.py ADDRESS1 ADDRESS2
python examples/personas.py --chat --save personas ADDRESS1 ADDRESS2

The base model stays frozen. Servers compute each row with the adapter of its client, in one batch for both. It prints
the share of the tokens of held-out answers that each persona finds likeliest, before and after, and the losses as a
curve. No thing of a held-out question is in a question that was learned. PEFT loads what `--save` writes.
"""

import argparse
import math
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import torch
from rich.progress import Progress, TaskID

import llmnode

ANSWERS = {
    "pirate": "Arr, {}! That be worth more than gold to me, matey.",
    "butler": "Certainly, sir. I shall have {} brought to the library at once.",
}
QUESTIONS = "What do you think of {}?", "Tell me about {}.", "Do you like {}?"
THINGS = "rain bread music cats books winter tea maps horses apples snow lamps soup trains roses clocks"
HELD_OUT = 4
"""The last things are in no question that is learned."""
IGNORED = -100
"""The label of a token that is no part of an answer."""
CURVE = "▁▂▃▄▅▆▇█"


class Persona:
    """A client that learns to answer in its own way. `base` is a distributed model, which it wraps."""

    def __init__(self, name: str, base: llmnode.DistributedModelForCausalLM) -> None:
        self.name = name
        self.tokenizer = base.tokenizer.loaded
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, config)
        self.losses: list[float] = []

    def learn(self, steps: int, batch: int, progress: Progress, task: TaskID) -> None:
        rng, examples = random.Random(1), self.examples(THINGS.split()[:-HELD_OUT])
        optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=0.01)
        for _ in range(steps):
            loss = self.model(**self._padded(rng.sample(examples, batch))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.item())
            progress.update(task, advance=1, description=f"{self.name}: loss {loss.item():.3f}")

    @torch.no_grad()
    def score(self) -> float:
        """The share of the tokens of held-out answers that it finds likeliest, each after the right ones before it."""
        inputs = self._padded(self.examples(THINGS.split()[-HELD_OUT:])[:HELD_OUT])
        labels = inputs.pop("labels")[:, 1:]
        found = self.model(**inputs).logits[:, :-1].argmax(-1)
        return float((found == labels)[labels != IGNORED].float().mean())

    def answer(self, question: str, most_tokens: int) -> str:
        ids = torch.tensor([self._prompt(question)])
        made = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most_tokens, do_sample=False
        )
        text: str = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return text.strip()

    def examples(self, things: list[str]) -> list[tuple[str, str]]:
        """Questions about these things, and this persona's answers."""
        return [(each.format(thing), ANSWERS[self.name].format(thing)) for each in QUESTIONS for thing in things]

    def _prompt(self, question: str) -> list[int]:
        said = [{"role": "system", "content": "Chat."}, {"role": "user", "content": question}]
        text: str = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return [*self.tokenizer(text).input_ids]

    def _padded(self, examples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """Padded on the right: `input_ids`, `attention_mask` and `labels`, each (examples, tokens)."""
        prompts = [self._prompt(question) for question, _ in examples]
        answers = [[*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id] for _, text in examples]
        pairs = list(zip(prompts, answers, strict=True))
        rows: dict[str, Any] = {
            "input_ids": ([*prompt, *answer] for prompt, answer in pairs),
            "attention_mask": ([1] * len(prompt + answer) for prompt, answer in pairs),
            "labels": ([IGNORED] * len(prompt) + answer for prompt, answer in pairs),
        }
        fills = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row) for row in some], batch_first=True, padding_value=fills[name]
            )
            for name, some in rows.items()
        }


def curve(losses: list[float]) -> str:
    """One character for each loss: the highest one stands for the largest loss, and "x" for one that is not finite."""
    most = max((loss for loss in losses if math.isfinite(loss)), default=0.0) or 1.0
    return "".join(CURVE[int(loss / most * (len(CURVE) - 1))] if math.isfinite(loss) else "x" for loss in losses)


def learn_together(personas: list[Persona], steps: int, batch: int) -> None:
    """Each in a thread, as each would be on a machine of its own."""
    with Progress() as progress, ThreadPoolExecutor(len(personas)) as threads:
        tasks = [progress.add_task(persona.name, total=steps) for persona in personas]
        runs = [
            threads.submit(persona.learn, steps, batch, progress, task)
            for persona, task in zip(personas, tasks, strict=True)
        ]
        for run in runs:
            run.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="questions of a step")
    parser.add_argument("--ask", metavar="QUESTION", default="Do you like clocks?", help="both answer it at the end")
    parser.add_argument("--new-tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--chat", action="store_true", help="ask more, a line each; an empty line ends it")
    parser.add_argument("--save", metavar="FOLDER", type=Path, help="write an adapter of each in PEFT's format")
    options = parser.parse_args()
    torch.manual_seed(1)
    with ExitStack() as stack:
        clients = {name: stack.enter_context(llmnode.connect(peers=options.peers)) for name in ANSWERS}
        personas = [Persona(name, client) for name, client in clients.items()]
        before = [persona.score() for persona in personas]
        learn_together(personas, options.steps, options.batch)
        for persona, baseline in zip(personas, before, strict=True):
            print(f"{persona.name}: loss {curve(persona.losses)} {persona.losses[-1]:.2f}")
            print(f"{persona.name}: {persona.score():.0%} of held-out tokens right (before: {baseline:.0%})")
            if options.save:
                persona.model.save_pretrained(options.save / persona.name)
        question = options.ask
        while question:
            for persona in personas:
                print(f"{persona.name}: {persona.answer(question, options.new_tokens)}", flush=True)
            question = input("> ").strip() if options.chat else ""


if __name__ == "__main__":
    main()
