"""`llmnode generate` and `llmnode chat` around a client of canned answers: lengths, samplers, empty answers, errors."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from llmnode.node import connect_options
from llmnode.node.cli import main
from llmnode.node.outcome import describe_empty
from llmnode.node.settings import without_settings
from unit.canned import CONTEXT_TOKENS, FAIL, INTERRUPT, REFUSED, CannedClient, canned_tokenizer, opened
from unit.terminal_emulator import TEXT, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return canned_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with patch.dict(os.environ, without_settings(os.environ), clear=True):
        yield


class Run:
    """The output of a command, with `model` in the place of a swarm's."""

    def __init__(self, model: CannedClient, command: str, *line: str, stdin: str | None = "") -> None:
        out, err = io.StringIO(), io.StringIO()
        config: Any = model.generation_config
        with (
            patch.object(sys, "stdin", None if stdin is None else io.StringIO(stdin)),
            patch.object(sys, "stdout", out),
            patch.object(sys, "stderr", err),
            patch.object(connect_options.Access, "open", lambda _self: opened(model)),
            patch.object(connect_options.Access, "generation_config", lambda _self: config),
        ):
            self.status = main([command, "--peers", PEER, *line])
        self.out, self.err = out.getvalue(), err.getvalue()
        self.last = (self.err.splitlines() or [""])[-1]


def generated(model: CannedClient, *line: str) -> list[dict[str, Any]]:
    run = Run(model, "generate", "--json", *line)
    assert run.status == 0, run.err
    return [json.loads(line) for line in run.out.splitlines()]


# Lengths


@pytest.mark.parametrize(("prompt", "new"), [(1, 63), (10, 54), (63, 1)])
def test_by_default_as_many_tokens_as_fit_follow(prompt: int, new: int, tokenizer: Any) -> None:
    model = CannedClient(tokenizer)
    generated(model, "--prompt", "x" * prompt)
    assert model.asked[-1] == min(64, new)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            ["--prompt", "x" * 10, "--max-new-tokens", "55"],
            "--prompt: 10 prompt tokens and 55 new ones exceed the model's",
        ),
        (["--prompt", "x" * 10, "--max-new-tokens", "55"], "ask for at most 54"),
        (
            ["--prompt", "x" * 64],
            "--prompt: 64 prompt tokens and a new one exceed the model's context of 64: shorten the prompt",
        ),
        (["--prompt", "x" * 101, "--max-new-tokens", "5"], "101 prompt tokens and a new one exceed"),
        (["--prompt", ""], "--prompt: the prompt is empty, and this model's tokenizer puts no token before it"),
        (["--samples", "2"], "--samples 2 would all be the same: give a --temperature"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(line: list[str], said: str, tokenizer: Any) -> None:
    run = Run(CannedClient(tokenizer), "generate", *line)
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith("llmnode: ") and said in run.err and run.err.count("\n") == 1


def test_the_prompt_that_is_too_long_is_named_by_its_line(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"one\n\n{'x' * 70}\n")
    assert (
        f"--prompts {file}, line 3: 70 prompt tokens"
        in Run(CannedClient(tokenizer), "generate", "--prompts", str(file)).err
    )


@pytest.mark.parametrize(("asked", "length"), [([], CONTEXT_TOKENS), (["--max-length", "20"], 20)])
def test_a_dialogue_has_the_model_s_context_at_most(asked: list[str], length: int, tokenizer: Any) -> None:
    model = CannedClient(tokenizer)
    assert Run(model, "chat", *asked, stdin="hi\n").status == 0
    assert model.canned_router.lengths == [length]
    assert model.asked[-1] == length - len("hi:")


def test_a_dialogue_longer_than_the_context_is_refused(tokenizer: Any) -> None:
    run = Run(CannedClient(tokenizer), "chat", "--max-length", "65")
    assert (run.status, run.last) == (
        2,
        "llmnode: --max-length 65: the model's context has 64 tokens: give at most those",
    )


# How texts end


def test_an_answer_is_empty_if_nothing_of_it_can_be_seen() -> None:
    assert describe_empty([5, 0], "x", [0]) == ""
    assert describe_empty([0], "", [0]) == "the model ended it at once, with token 0"
    assert "2 tokens are spaces" in describe_empty([5, 5], " \n", [0])
    assert "before its first token" in describe_empty([], "", [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is full is a device of Linux")
def test_receipts_that_cannot_be_written_hide_no_answer(tokenizer: Any) -> None:
    run = Run(CannedClient(tokenizer), "generate", "--json", "--receipts", "/dev/full")
    assert run.status == 2
    assert run.last == "llmnode: /dev/full: cannot be written (No space left on device): name another file"
    assert json.loads(run.out)["text"] == "é 好"


def test_an_empty_answer_is_said_and_explained(tokenizer: Any, tmp_path: Path) -> None:
    model = CannedClient(tokenizer, says="")
    (answer,) = generated(model, "--prompt", "hi")
    assert (answer["text"], answer["finish_reason"], answer["token_ids"]) == ("", "end", [0])
    run = Run(model, "generate", "--prompt", "hi")
    assert (run.status, run.out) == (0, "hi\n")
    assert run.last.startswith(
        "llmnode: the text is empty: the model ended it at once, with token 0; give another prompt"
    )
    (tmp_path / "prompts").write_text("one\ntwo\n")
    run = Run(model, "generate", "--chat", "--prompts", str(tmp_path / "prompts"))
    assert run.err.count(" is empty: the model ended it at once") == 2
    run = Run(model, "chat", stdin="hi\n")
    assert run.last.startswith("llmnode: the answer is empty: the model ended it at once")


@pytest.mark.parametrize("config", [{}, {"do_sample": True, "temperature": 0.5, "top_k": 3}])
def test_one_text_and_several_are_chosen_alike_and_say_how(
    config: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    model = CannedClient(tokenizer, **config)
    (tmp_path / "prompts").write_text("one\ntwo\n")
    answers = [
        *generated(model, "--seed", "1"),
        *generated(model, "--seed", "1", "--prompts", str(tmp_path / "prompts")),
    ]
    assert len(answers) == 3
    told = {"do_sample": False, **config, "seed": 1}
    assert all(answer["sampling"] == told and answer["finish_reason"] == "end" for answer in answers)


# Failures in the middle


@pytest.mark.parametrize(("prompt", "status"), [(FAIL, 1), (INTERRUPT, 130), (REFUSED, 2)])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_error_in_the_middle_of_a_text_begins_a_line(
    prompt: str, status: int, as_json: list[str], tokenizer: Any
) -> None:
    run = Run(CannedClient(tokenizer), "generate", "--prompt", prompt, *as_json)
    assert run.status == status
    assert run.last.startswith("llmnode: ")
    assert (run.err if as_json else run.out).startswith(prompt)
    assert run.out == "" or run.out.endswith("\n")


def test_whatever_a_line_is_the_dialogue_goes_on(tokenizer: Any) -> None:
    lines = ["hi", FAIL, INTERRUPT, REFUSED, "x" * 70, "a\0b", "/what", "/reset", "bye"]
    run = Run(CannedClient(tokenizer), "chat", stdin="\n".join(lines))
    assert run.status == 0
    assert run.out.splitlines()[0] == run.out.splitlines()[-1] == "é 好"
    said = [line for line in run.err.splitlines() if line.startswith("llmnode: ")]
    assert [line.split(": ")[1][:20] for line in said] == [
        "session lost", "stopped", "this model does not ", "the dialogue is full", "this line was no tex",
    ]  # fmt: skip


HOSTILE = "\x1b]0;OWNED\x07\x1b[31mé\x9b2J\u202e👨\u200d👩\rllmnode: x\u2028"


@pytest.mark.parametrize(
    ("line", "stdin"),
    [
        (["generate", "--prompt", "hi"], ""),
        (["generate", "--prompt", "hi", "--json"], ""),
        (["generate", "--prompts", "FILE"], ""),
        (["generate", "--prompt", f"{FAIL}{HOSTILE[:9]}"], ""),
        (["chat"], f"hi\n{FAIL}\n"),
    ],
)
def test_neither_model_nor_peer_steers_the_terminal(
    line: list[str], stdin: str, tokenizer: Any, tmp_path: Path
) -> None:
    """A token is a byte: escape sequences, and characters, come in pieces."""
    (tmp_path / "FILE").write_text("hi\nho\n")
    command, *options = [str(tmp_path / "FILE") if each == "FILE" else each for each in line]
    run = Run(CannedClient(tokenizer, says=HOSTILE), command, *options, stdin=stdin)
    terminal = Terminal()
    terminal.feed(run.out + run.err)
    assert (terminal.state, terminal.obeyed) == (TEXT, [])
    assert "\u202e" not in terminal.shown and "\u2028" not in terminal.shown
    assert not any(each.startswith(("llmnode: ready", "llmnode: x")) for each in terminal.shown.split("\n"))
    if not stdin and FAIL not in line[-1]:
        assert "👨\u200d👩" in terminal.shown
    if "--json" in line:
        assert json.loads(run.out)["text"] == HOSTILE


def test_a_message_that_alone_fills_a_dialogue_is_told_so(tokenizer: Any) -> None:
    run = Run(CannedClient(tokenizer), "chat", "--max-length", "20", stdin="x" * 30 + "\n")
    assert run.last == (
        "llmnode: this message takes 31 tokens, of 20 for a dialogue: shorten it or start with a longer --max-length; "
        "this message is not part of the dialogue"
    )


def test_without_stdin_nothing_is_begun(tokenizer: Any) -> None:
    run = Run(CannedClient(tokenizer), "chat", stdin=None)
    assert (run.status, run.err.count("\n")) == (2, 1)
