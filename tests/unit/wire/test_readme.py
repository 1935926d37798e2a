"""The page of the wire has every frame with its number, and every field of every message."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

from llmnode.wire import messages
from llmnode.wire.frame import LINK_VERSIONS, FrameType
from llmnode.wire.messages import AnyMessage

PAGE = (Path(messages.__file__).parent / "README.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in re.findall(r"^\| [A-Z]+ \|.*\|$", PAGE, re.MULTILINE)
]
MESSAGE = re.compile(r"`([A-Z]\w+)`[^:|`]*: ((?:`\w+`(?:,\s*)?)+)")


def test_every_frame_has_a_row_with_its_number() -> None:
    assert {row[0]: int(row[1]) for row in ROWS} == {kind.name: kind.value for kind in FrameType}


def test_every_message_is_there_with_all_of_its_fields() -> None:
    described = {name: re.findall(r"`(\w+)`", names) for name, names in MESSAGE.findall(PAGE)}
    assert described == {kind.__name__: [field.name for field in fields(kind)] for kind in get_args(AnyMessage)}


def test_every_version_has_a_row() -> None:
    assert all(f"\n| {version} |" in PAGE for version in LINK_VERSIONS)
