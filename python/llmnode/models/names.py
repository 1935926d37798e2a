"""The names by which machines open the same model. It imports nothing large: a node says them, and runs no model."""

from __future__ import annotations

from llmnode.core.identity import commit_of

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def name_elsewhere(name: str, digest: bytes) -> str | None:
    """The name by which another machine opens the same model, with its commit if it is on the hub.

    None for files that only this machine has.
    """
    if (commit := commit_of(digest)) is not None:
        return f"{name}@{commit}"
    return EMBEDDED_MODEL if name == EMBEDDED_MODEL else None
