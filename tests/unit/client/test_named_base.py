"""The name and the commit of the base in a saved adapter's config."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from llmnode.client.named_base import name_base
from llmnode.core.identity import Identity, Origin, Weights
from llmnode.core.model import ModelInfo

COMMIT, OTHER = "ab" * 20, "cd" * 20


def _base(origin: Origin, commit: str = COMMIT) -> ModelInfo:
    digest = Identity(Weights(origin, bytes.fromhex(commit)), b"l" * 5, b"c" * 6).digest
    return ModelInfo("org/name", digest, blocks=4, hidden_size=4, context_tokens=64)


ON_HUB, HERE = _base(Origin.HUB), _base(Origin.FOLDER)


@pytest.mark.parametrize(
    ("base", "was", "found"),
    [
        (ON_HUB, None, COMMIT),
        (ON_HUB, OTHER, COMMIT),
        (ON_HUB, "v1.0", "v1.0"),
        (ON_HUB, "Cd" * 20, "Cd" * 20),
        (HERE, None, None),
        (HERE, OTHER, OTHER),
    ],
)
def test_the_revision_is_the_commit_of_the_base_unless_somebody_named_a_branch(
    base: ModelInfo, was: str | None, found: str | None
) -> None:
    config = LoraConfig(revision=was)
    name_base([config], base)
    assert config.revision == found


def test_a_config_that_is_used_for_another_model_has_its_commit() -> None:
    config = LoraConfig()
    for base, found in ((ON_HUB, COMMIT), (_base(Origin.HUB, OTHER), OTHER), (HERE, None)):
        name_base([config], base)
        assert config.revision == found


@pytest.mark.parametrize(("named", "found"), [("/home/me/model", "org/name"), ("a/b", "a/b"), (None, None)])
def test_no_path_of_this_machine_is_named(named: str | None, found: str | None) -> None:
    config = LoraConfig(base_model_name_or_path=named)
    name_base([config], ON_HUB)
    assert config.base_model_name_or_path == found
