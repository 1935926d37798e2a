"""Names of models on the Hugging Face hub: `org/name` or `org/name@revision`. Tags of adapters there. Asks no hub."""

from __future__ import annotations

import re
from typing import NamedTuple

HUB = "hub:"
"""It may stand before such a name, which is then never taken for a path of this machine."""
ADAPTER_TAG = "base_model:adapter:"
"""The tag of adapters, before the name of their base. PEFT writes it, too, and the hub reads it."""
REVISION_TAG = "base_model_revision:"
"""A tag of ours, before the commit of the base."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./+-]*))?", re.ASCII)
_ENDS_OF_FILES = (".gguf", ".safetensors", ".json")


class SplitName(NamedTuple):
    """`revision` is a branch, a tag or a commit; None for the newest."""

    repo: str
    revision: str | None


def split_hub_name(text: str) -> SplitName | None:
    """None if it cannot be the name of a model on the hub."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or text.lower().endswith(_ENDS_OF_FILES):
        return None
    return SplitName(match["repo"], match["revision"])
