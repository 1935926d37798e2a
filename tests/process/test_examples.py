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


def test_the_example_of_a_model(nodes: list[Any]) -> None:
    """In a process of its own, as users start it. The other examples run in this one."""
    command = [sys.executable, str(EXAMPLES / "generate.py"), *(node.address for node in nodes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris")


def test_the_example_of_streamed_answers(nodes: list[Any]) -> None:
    addresses = [node.address for node in nodes]
    questions = ["What is the capital of France?", "Is the sky blue?"]
    done = in_process.program(EXAMPLES / "streaming_chat.py", *questions, "--", *addresses)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.count(" tokens, ") == 2


def test_the_example_that_learns_topics_is_right_more_often_than_a_guess(nodes: list[Any], tmp_path: Path) -> None:
    picture, saved = tmp_path / "loss.png", tmp_path / "saved"
    options = ["--steps", "5", "--batch", "8", "--plot", str(picture), "--save", str(saved)]
    done = in_process.program(EXAMPLES / "topics.py", *options, *(node.address for node in nodes))
    assert done.returncode == 0, done.stderr
    (score,) = re.findall(r"right: (\d+)% \(a guess: 25%\)", done.stdout)
    assert int(score) >= 40
    assert picture.stat().st_size > 1000
    assert (saved / "adapter_model.safetensors").exists()


def test_the_example_of_a_module_between_spans_makes_the_target_likelier(nodes: list[Any]) -> None:
    done = in_process.program(EXAMPLES / "between_spans.py", "--steps", "6", *(node.address for node in nodes))
    assert done.returncode == 0, done.stderr
    after, before = map(float, re.findall(r"-\d+\.\d+", done.stdout))
    assert after > before + 0.5


def test_the_example_of_deep_prompts_learns_a_corpus(nodes: list[Any], tmp_path: Path) -> None:
    options = ["--steps", "3", "--batch", "3", "--new-tokens", "3", "--save", str(tmp_path)]
    peers = [node.address for node in nodes]
    done = in_process.program(EXAMPLES / "deep_prompts.py", *options, *peers)
    assert done.returncode == 0, done.stderr
    after, before = map(float, re.findall(r"\d+\.\d\d", done.stdout.splitlines()[-2]))
    assert after < before - 0.05
    assert (tmp_path / "model.safetensors").exists()


def test_the_example_of_two_personas_teaches_each_its_own_answers(nodes: list[Any], tmp_path: Path) -> None:
    options = ["--steps", "3", "--batch", "2", "--new-tokens", "2", "--save", str(tmp_path)]
    done = in_process.program(EXAMPLES / "personas.py", *options, *(node.address for node in nodes))
    assert done.returncode == 0, done.stderr
    scores = re.findall(r"(\w+): (\d+)% of held-out tokens right \(before: (\d+)%\)", done.stdout)
    assert [name for name, _, _ in scores] == ["pirate", "butler"]
    for name, after, before in scores:
        assert int(after) >= 40 > int(before) + 10
        assert (tmp_path / name / "adapter_model.safetensors").exists()
