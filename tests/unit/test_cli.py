"""The command line's own part: help, exit statuses, errors that name the fix. What commands do is tested elsewhere."""

from __future__ import annotations

import pytest

from llmnode.node.cli import main

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
COMMANDS = ["demo", "serve", "generate", "chat", "bench"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"examples:\n  llmnode {command}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"\n    {command} " in listed for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["serve", "--blocks", "5"], "write START:END"),
        (["serve", "--blocks", "5:5"], "write START:END"),
        (["serve", "--blocks", "0:5", "--threads", "0"], "--threads 0: give at least 1"),
        (["serve", "--blocks", "0:5", "--kv-tokens", "-1"], "--kv-tokens -1: give at least 1"),
        (["demo", "--servers", "0"], "--servers 0: give at least 1"),
        (["demo", "--servers", "31"], "choose 1 to 30"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens 0: give at least 1"),
        (["generate", "--peers", "nonsense"], "is not the address of a peer"),
        (["generate", "--peers", PEER, "--temperature", "-1"], "--temperature -1: give 0 or more"),
        (["generate", "--peers", PEER, "--prompts", "/nowhere"], "--prompts /nowhere: cannot be read"),
        (["generate", "--peers", PEER, "--model", "/nowhere"], "is neither HuggingFaceTB/"),
        (["chat", "--peers", PEER, "--top-p", "0"], "--top-p 0: give more than 0"),
        (["chat", "--peers", PEER, "--max-length", "0"], "--max-length 0: give at least 1"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_fix(
    arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("llmnode: ")
    assert fix in line
