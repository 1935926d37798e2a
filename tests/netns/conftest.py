"""Whether there can be namespaces here, and the table of what went through that ends the tests."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Any

import pytest

from netns.internet import open_internet, why_not
from netns.nodes import MANY_TOKENS, PROMPT, Crossing, Question
from process import conftest as of_processes
from process.small_server import expected_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from netns.internet import Internet

no_settings = of_processes.no_settings
CROSSINGS = pytest.StashKey[list[Crossing]]()


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where there are none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def internet(namespaces: None) -> Iterator[Internet]:
    with open_internet() as internet:
        yield internet


@pytest.fixture(scope="session")
def question(folder: Any, transformers_model: Any) -> Question:
    from llmnode.models.text.tokenizer import load_tokenizer

    prompt = load_tokenizer(folder).encode(PROMPT)
    expected = expected_tokens(transformers_model, prompt, MANY_TOKENS)
    assert len(expected) == MANY_TOKENS
    return Question(prompt, expected)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[Crossing], None]:
    """Put it into the table."""
    return request.config.stash.setdefault(CROSSINGS, []).append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # Any: pytest does not export it
    if crossings := config.stash.get(CROSSINGS, []):
        terminalreporter.section("sessions that were exact, and their way")
        names = [field.name.replace("_", " ") for field in fields(Crossing)]
        for row in [names, ["---"] * len(names), *map(astuple, crossings)]:
            terminalreporter.write_line(f"| {' | '.join(row)} |")
    measured = [each for report in terminalreporter.getreports("passed") for each in report.user_properties]
    if measured:
        terminalreporter.section("measured")
        for name, value in measured:
            terminalreporter.write_line(f"{name}: {value}")
