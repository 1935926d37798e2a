"""Stdout and stderr of a test, prepared as those of the program."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from llmnode.node.terminal import prepared

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def streams(stdout: Any, stderr: Any) -> Iterator[None]:
    with patch.object(sys, "stdout", stdout), patch.object(sys, "stderr", stderr), prepared():
        yield
