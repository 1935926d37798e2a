"""Amounts of memory as users give them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmnode.core.errors import ConfigError

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}
_AMOUNT = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)\s*(%|{'|'.join(_UNITS)})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Memory:
    """An amount of memory in bytes, or a share of what is free."""

    size_bytes: int = 0
    share: float = 0.0

    def of(self, free_bytes: int) -> int:
        """The amount in bytes, where `free_bytes` are free. It may be more than that."""
        return self.size_bytes or int(self.share * free_bytes)


def parse_memory(text: str, what: str = "memory") -> Memory:
    """Raises ConfigError, which says `what` it is for, if it is not written like 20% or 2GiB."""
    match = _AMOUNT.fullmatch(text.strip())
    number = float(match[1]) if match else 0.0
    if not match or not number or (match[2] == "%" and number > 100):
        raise ConfigError(f"{what} {text!r}: write a share of what is free, as 20%, or an amount, as 2GiB or 500MB")
    if match[2] == "%":
        return Memory(share=number / 100)
    return Memory(size_bytes=int(number * _UNITS[match[2]]))
