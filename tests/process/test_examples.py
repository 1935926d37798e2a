"""The programs in `examples/`, against a running swarm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from process import in_process

pytestmark = [pytest.mark.process, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", sorted(each.name for each in EXAMPLES.glob("*.py")))
def test_each_example_says_how_to_start_it(example: str) -> None:
    done = in_process.program(EXAMPLES / example, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python examples/{example}" in done.stdout and "ADDRESS" in done.stdout


def test_the_example_of_a_model(nodes: list[Any]) -> None:
    """In a process of its own, as users start it. The other examples run in this one."""
    command = [sys.executable, str(EXAMPLES / "generate.py"), *(node.address for node in nodes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris")


def test_the_example_of_streamed_answers(nodes: list[Any]) -> None:
    addresses = [node.address for node in nodes]
    questions = ["What is the capital of France?", "Is the sky blue?"]
    done = in_process.program(EXAMPLES / "streaming_chat.py", *addresses, "--ask", *questions)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.count(" tokens, ") == 2


def _asked(example: str, pattern: str) -> tuple[float, list[str]]:
    """The figure that the README says the test asks for, and the options of its run, as the README says them."""
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{example}` |")]
    (found,) = re.findall(rf"The test asks for {pattern} after (\d+) steps of (\d+)", row)
    return float(found[0]), ["--steps", found[1], "--batch", found[2]]


def test_the_example_that_learns_topics_is_right_more_often_than_a_guess(nodes: list[Any], tmp_path: Path) -> None:
    picture, saved = tmp_path / "loss.png", tmp_path / "saved"
    least, options = _asked("topics.py", r"(\d+) %")
    options += ["--plot", str(picture), "--save", str(saved)]
    done = in_process.program(EXAMPLES / "topics.py", *options, *(node.address for node in nodes))
    assert done.returncode == 0, done.stderr
    (score,) = re.findall(r"right: (\d+)% \(a guess: 25%\)", done.stdout)
    assert int(score) >= least > 25 + 10
    assert picture.stat().st_size > 1000
    assert (saved / "adapter_model.safetensors").exists()


def test_the_example_of_a_module_between_spans_has_the_model_end_other_statements_in_its_way(nodes: list[Any]) -> None:
    least, options = _asked("between_spans.py", r"(\d+) %")
    done = in_process.program(EXAMPLES / "between_spans.py", *options, *(node.address for node in nodes))
    assert done.returncode == 0, done.stderr
    ((after, before),) = re.findall(r"(\d+)% of held-out tokens right \(before: (\d+)%\)", done.stdout)
    assert int(after) >= least > int(before) + 10
    assert _has_curve(done.stdout, options)


def test_the_example_of_deep_prompts_learns_a_corpus(nodes: list[Any], tmp_path: Path) -> None:
    least, options = _asked("deep_prompts.py", r"a loss that is lower by (\d\.\d+)")
    options += ["--new-tokens", "3", "--save", str(tmp_path)]
    peers = [node.address for node in nodes]
    done = in_process.program(EXAMPLES / "deep_prompts.py", *options, *peers)
    assert done.returncode == 0, done.stderr
    ((after, before),) = re.findall(r"held-out lines: (\d+\.\d+) \(before: (\d+\.\d+)\)", done.stdout)
    assert float(after) <= float(before) - least
    assert _has_curve(done.stdout, options)
    assert (tmp_path / "model.safetensors").exists()


def test_the_example_of_two_personas_teaches_each_its_own_answers_and_chats(nodes: list[Any], tmp_path: Path) -> None:
    least, options = _asked("personas.py", r"(\d+) %")
    options += ["--new-tokens", "2", "--save", str(tmp_path), "--chat"]
    peers = [node.address for node in nodes]
    done = in_process.program(EXAMPLES / "personas.py", *options, *peers, typed="Do you like trains?\n\nNot read.\n")
    assert done.returncode == 0, done.stderr
    scores = re.findall(r"(\w+): (\d+)% of held-out tokens right \(before: (\d+)%\)", done.stdout)
    assert [name for name, _, _ in scores] == ["pirate", "butler"]
    for name, after, before in scores:
        assert int(after) >= least > int(before) + 10
        assert (tmp_path / name / "adapter_model.safetensors").exists()
    assert _has_curve(done.stdout, options)
    answers = re.findall(r"^(?:> )?(pirate|butler): (?!loss |\d+%)(.+)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in answers] == ["pirate", "butler"] * 2, "to the first question, and to the typed one"
    texts = [text for _, text in answers]
    assert not {*texts[::2]} & {*texts[1::2]}, "each in its own way"
    assert done.stdout.endswith("> "), "an empty line ends the chat"


def _has_curve(output: str, options: list[str]) -> bool:
    """Whether it shows the loss of each step as a character."""
    return bool(re.search(rf"loss [▁▂▃▄▅▆▇█]{{{options[1]}}} \d+\.\d\d$", output, re.MULTILINE))
