"""`llmnode chat`: which messages are commands."""

from __future__ import annotations

import pytest

from llmnode.node.chat import HELP, Command, command_in


@pytest.mark.parametrize("message", ["/quit", "/exit", "exit"])
def test_chat_is_left_by_the_words_that_users_try(message: str) -> None:
    assert command_in(message) is Command.LEAVE


def test_other_words_with_a_slash_ask_for_help_which_names_the_commands() -> None:
    assert command_in("/reset") is Command.RESET
    assert command_in("/leave") is Command.HELP
    named = [word.strip(",;") for word in HELP.split() if word.startswith("/")]
    assert {command_in(each) for each in named} == {Command.LEAVE, Command.RESET}


@pytest.mark.parametrize("message", ["", "exit the room", "How do I exit vim?", "quit smoking"])
def test_a_message_with_such_a_word_is_for_the_model(message: str) -> None:
    assert command_in(message) is None
